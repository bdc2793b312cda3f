"""Predict memory, communication and time of a training run, without starting it."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.training.options import PlanRunOptions


def main(options: PlanRunOptions) -> int:
    """Print the prediction; exit with 1 if the run does not fit in ``--device-memory-gb``."""
    from megatron_chameleon.training.run_estimate import plan_run

    return plan_run(options)


COMMAND = Tool(main, PlanRunOptions)
