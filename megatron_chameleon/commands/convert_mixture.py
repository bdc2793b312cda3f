"""Convert a mixture between the formats of several trainers."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.interchange.options import ConvertOptions


def main(options: ConvertOptions) -> None:
    """Write or print the mixture."""
    from megatron_chameleon.interchange import convert_mixture

    convert_mixture(options)


COMMAND = Tool(main, ConvertOptions)
