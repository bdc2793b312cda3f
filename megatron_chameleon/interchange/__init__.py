"""Mixtures in the formats of other trainers, both ways. Loads no torch."""

from megatron_chameleon.interchange.convert import convert_mixture, write_blend
from megatron_chameleon.interchange.formats import FORMATS, read_mixture, write_mixture
from megatron_chameleon.interchange.options import ConvertOptions, FormatName

__all__ = [
    "FORMATS",
    "ConvertOptions",
    "FormatName",
    "convert_mixture",
    "read_mixture",
    "write_blend",
    "write_mixture",
]
