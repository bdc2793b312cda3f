#!/usr/bin/env python3
"""Print what each rank of a training run would hold, before anything is started."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.memory import EstimateMemoryOptions


def main(options: EstimateMemoryOptions) -> int:
    """Print the table; status 1 if the run does not fit in the memory that was given."""
    from megatron_chameleon.model.memory_report import print_estimate

    return print_estimate(options)


if __name__ == "__main__":
    run_tool(main, EstimateMemoryOptions)
