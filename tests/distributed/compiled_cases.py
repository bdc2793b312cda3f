"""Layouts whose layers are compiled. No torch here: the tests look at results alone."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.recompute import RecomputeOptions

NUM_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and what else is not as by default."""

    parallel: TrainingParallelOptions
    bf16: bool = False
    document_masks: bool = False


FULL, SELECTIVE = RecomputeOptions("full"), RecomputeOptions("selective")
CASES = {
    "tp2": Case(TrainingParallelOptions(tensor_model_parallel_size=2)),
    "sp2-selective": Case(
        TrainingParallelOptions(
            tensor_model_parallel_size=2, sequence_parallel=True, recompute=SELECTIVE
        )
    ),
    "sp2-full-bf16": Case(
        TrainingParallelOptions(
            tensor_model_parallel_size=2, sequence_parallel=True, recompute=FULL
        ),
        bf16=True,
    ),
    "pp2-full": Case(TrainingParallelOptions(pipeline_model_parallel_size=2, recompute=FULL)),
    "vpp2": Case(
        TrainingParallelOptions(
            pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2
        )
    ),
    "dp2-masked": Case(
        TrainingParallelOptions(use_distributed_optimizer=True, overlap_grad_reduce=True),
        document_masks=True,
    ),
}
