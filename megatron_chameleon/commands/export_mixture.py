"""Write a mixture in another trainer's format."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.interchange import ExportOptions


def main(options: ExportOptions) -> None:
    """Write or print the mixture."""
    from megatron_chameleon.interchange import export_mixture

    export_mixture(options)


COMMAND = Tool(main, ExportOptions)
