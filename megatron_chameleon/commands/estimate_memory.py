"""Estimate the memory of each rank of a training run, without starting it."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.training.options import EstimateMemoryOptions


def main(options: EstimateMemoryOptions) -> int:
    """Print the estimate; exit with 1 if the run does not fit in ``--device-memory-gb``."""
    from megatron_chameleon.training.memory import print_estimate

    return print_estimate(options)


COMMAND = Tool(main, EstimateMemoryOptions)
