"""Where a run stands, looked up on one rank, and what it logged."""

from __future__ import annotations

from pathlib import Path

from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.checkpointing import find_progress, roll_back
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.run_folder import Progress, locked_run_folder, starting_run


def progress_of_run(options: PretrainOptions) -> Progress:
    """What a command with these options goes on from, its folder made ready."""
    plan = plan_training(options)
    with (
        distributed(TrainingParallelOptions(), seed=0) as layout,
        locked_run_folder(options.run_dir),
    ):
        progress = find_progress(plan, layout)
        with starting_run(options.run_dir, overwrite=options.overwrite):
            roll_back(progress, options.run_dir)
        return progress


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of each record of the run's metrics."""
    return [(record["step"], record["loss"]) for record in read_metrics(run_dir / METRICS_NAME)]
