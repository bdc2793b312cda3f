"""How a model is spread over ranks."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.ranges import Count, Minutes
from megatron_chameleon.options.recompute import RecomputeOptions


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """How the model is spread over the ranks that torchrun started; the rest is data parallel."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer; must divide the number of attention heads."""
    pipeline_model_parallel_size: Count = 1
    """Stages that the layers are cut into; must divide the number of layers."""
    sequence_parallel: bool = False
    """Split layer norms and residuals along the sequence too; needs tensor parallelism."""
    distributed_timeout_minutes: Minutes = 10
    """Minutes that ranks wait for one that is behind, before they give up; give more where the
    first rank reads much by itself."""


@dataclasses.dataclass(frozen=True)
class TrainingParallelOptions(ParallelOptions):
    """The same, with what only training has: gradients and an optimizer."""

    num_virtual_stages_per_pipeline_rank: Count = 1
    """Cut each pipeline stage into this many, interleaved over the ranks: less waiting, more
    communication."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Send gradients to the other data-parallel ranks while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather what a sharded optimizer updated while the next forward pass goes on."""
    recompute: RecomputeOptions = dataclasses.field(default_factory=RecomputeOptions)
