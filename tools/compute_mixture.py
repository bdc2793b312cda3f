#!/usr/bin/env python3
"""Find a mixture: torchrun --nproc-per-node N tools/compute_mixture.py [--method M] ..."""

from __future__ import annotations

from megatron_chameleon.cli import Choice, run_choice
from megatron_chameleon.methods.common.registry import (
    DEFAULT_METHOD,
    look_for_methods,
    methods_listed,
)

if __name__ == "__main__":
    found = look_for_methods()
    run_choice(
        Choice(
            flag="--method",
            default=DEFAULT_METHOD,
            commands={name: (m.compute, m.options) for name, m in found.usable.items()},
            listing_flag="--list-methods",
            listing=methods_listed,
            unusable=found.unusable,
        )
    )
