"""Compute a mixture of domains with Chameleon or another method.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon compute_mixture [--method M] ...``.
With ``--headroom``, only predict what a mixture can gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_chameleon.cli import Choice, Tool
from megatron_chameleon.methods.method import DEFAULT_METHOD, discover_methods, format_method_list
from megatron_chameleon.methods.mixmin import HeadroomOptions, compute_headroom


def find_tools() -> tuple[Mapping[str, Tool], Sequence[str]]:
    """The tool of each usable method, and the problem of each other method."""
    found = discover_methods()
    tools = {name: Tool(method.compute, method.options) for name, method in found.usable.items()}
    return tools, found.unusable


COMMAND = Choice(
    "--method",
    DEFAULT_METHOD,
    find_tools,
    "--list-methods",
    format_method_list,
    {"--headroom": Tool(compute_headroom, HeadroomOptions)},
)
