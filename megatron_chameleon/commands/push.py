"""Write a run's model as a Hugging Face repository, to a folder or to the hub."""

from __future__ import annotations

from megatron_chameleon.checkpoint.options import PushOptions
from megatron_chameleon.cli import Tool


def main(options: PushOptions) -> None:
    """Write the repository, and upload it with --hub."""
    from megatron_chameleon.push import push

    push(options)


COMMAND = Tool(main, PushOptions)
