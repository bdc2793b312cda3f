#!/usr/bin/env python3
"""List the documents that each step of a training run read."""

from __future__ import annotations

from megatron_chameleon.blend.options import TraceOptions
from megatron_chameleon.cli import run_tool


def main(options: TraceOptions) -> None:
    """Print which documents the steps read, or when documents were read."""
    from megatron_chameleon.blend.trace import trace_samples

    trace_samples(options)


if __name__ == "__main__":
    run_tool(main, TraceOptions)
