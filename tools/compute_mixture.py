#!/usr/bin/env python3
"""Compute a mixture: torchrun --nproc-per-node N tools/compute_mixture.py [--method M] ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_choice
from megatron_chameleon.methods.method import DEFAULT_METHOD, discover_methods, format_method_list

if __name__ == "__main__":
    found = discover_methods()
    run_choice(
        "--method",
        {name: (m.compute, m.options) for name, m in found.usable.items()},
        default=DEFAULT_METHOD,
        listing_flag="--list-methods",
        listing=format_method_list,
        unusable=found.unusable,
    )
