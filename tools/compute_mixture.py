#!/usr/bin/env python3
"""Find a mixture: torchrun --nproc-per-node N tools/compute_mixture.py ..."""

from megatron_chameleon.cli import run_tool
from megatron_chameleon.methods.chameleon import compute_mixture
from megatron_chameleon.options.mixture import MixtureOptions

if __name__ == "__main__":
    run_tool(compute_mixture, MixtureOptions)
