"""List the documents that each step of a training run read."""

from __future__ import annotations

from megatron_chameleon.blend.options import TraceOptions
from megatron_chameleon.cli import Tool


def main(options: TraceOptions) -> None:
    """Print which documents the steps read, or which steps read a document."""
    from megatron_chameleon.blend.trace import trace_samples

    trace_samples(options)


COMMAND = Tool(main, TraceOptions)
