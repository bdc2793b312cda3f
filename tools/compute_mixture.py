#!/usr/bin/env python3
"""Find a mixture: torchrun --nproc-per-node N tools/compute_mixture.py ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.mixture import MixtureOptions


def main(options: MixtureOptions) -> None:
    """Embed the domains and weigh them."""
    from megatron_chameleon.methods.chameleon import compute_mixture

    compute_mixture(options)


if __name__ == "__main__":
    run_tool(main, MixtureOptions)
