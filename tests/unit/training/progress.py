"""Where a run stands, looked up on one rank."""

from __future__ import annotations

from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.resume import Progress, find_progress


def progress_of_run(options: PretrainOptions) -> Progress:
    """What a command with these options would go on from."""
    plan = plan_training(options)
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        return find_progress(plan, layout)
