"""One optimizer step over one global batch, under any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step left behind.

    Attributes:
        domain_sums: [k, 3] in float64 over this rank's micro-batches: per domain, summed loss,
            tokens that have one, and tokens drawn; zero on ranks that are not in the last pipeline
            stage, and the same on tensor-parallel ranks.
        grad_norm: global norm of the gradient, before clipping.
        skipped: whether the optimizer refused to update the model.
    """

    domain_sums: torch.Tensor
    grad_norm: float
    skipped: bool = False


def train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    forward_backward: Callable[[], torch.Tensor],
) -> StepResult:
    """Forward, backward and update.

    Args:
        model: this rank's chunks, one for each of its virtual pipeline stages.
        optimizer: of all of them.
        scheduler: of the learning rate.
        forward_backward: fills the gradient buffers from the next global batch, and returns the
            sums of :class:`StepResult`.
    """
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Before the update, so that the first step does not run at rate 0; and before the passes, which
    # a method may watch that asks for the rate of their update.
    scheduler.step(1)
    domain_sums = forward_backward()
    updated, grad_norm, _ = optimizer.step()
    return StepResult(domain_sums, float(grad_norm or 0.0), skipped=not updated)
