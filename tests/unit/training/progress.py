"""Where a run stands, looked up on one rank."""

from __future__ import annotations

from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.resume import Progress, find_progress, go_back
from megatron_chameleon.training.run_folder import beginning, held_folder


def progress_of_run(options: PretrainOptions) -> Progress:
    """What a command with these options goes on from, its folder made ready."""
    plan = plan_training(options)
    with distributed(TrainingParallelOptions(), seed=0) as layout, held_folder(options.run_dir):
        progress = find_progress(plan, layout)
        with beginning(options.run_dir, overwrite=options.overwrite):
            go_back(progress, options.run_dir)
        return progress
