"""One optimizer step over one global batch, under any layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_chameleon.blend.sampler import Batch


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step left behind.

    Attributes:
        domain_sums: [k, 2] in float64: summed loss and number of tokens per domain over this
            rank's micro-batches; zero on ranks that are not in the last pipeline stage.
        grad_norm: global norm of the gradient, before clipping.
    """

    domain_sums: torch.Tensor
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """How the global batch is cut up on each data-parallel rank."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


def train_step(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Iterator[Batch],
    shape: BatchShape,
    num_domains: int,
) -> StepResult:
    """Forward, backward and update. ``batches`` yields this rank's micro-batches."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, num_domains),
        data_iterator=batches,
        model=[model],
        num_microbatches=shape.num_microbatches,
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        forward_only=False,
    )
    scheduler.step(1)  # before the update, so that the first step does not run at rate 0
    _, grad_norm, _ = optimizer.step()
    device = next(model.parameters()).device
    domain_sums = torch.zeros(num_domains, 2, dtype=torch.float64, device=device)
    for output in outputs:  # empty but on the last pipeline stage
        domain_sums += output["domain_sums"]
    return StepResult(domain_sums, float(grad_norm or 0.0))


def _forward_step(
    num_domains: int, batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, functools.partial[tuple[torch.Tensor, Batch]]]:
    """The model's output, and the function that turns it into a loss, as schedules ask."""
    device = next(model.parameters()).device
    batch = {name: part.to(device) for name, part in next(batches).items()}
    token_losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return token_losses, functools.partial(_mean_loss, batch, num_domains)


def _mean_loss(
    batch: Batch, num_domains: int, token_losses: torch.Tensor
) -> tuple[torch.Tensor, Batch]:
    """Mean over the micro-batch's tokens, and sums per domain for the log.

    Every window is full, so the mean of the micro-batches' means is the global batch's mean.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    sums = torch.zeros(num_domains, 2, dtype=torch.float64, device=masked.device)
    sums[:, 0].index_add_(0, batch["domain"], masked.detach().sum(1, dtype=torch.float64))
    sums[:, 1].index_add_(0, batch["domain"], batch["loss_mask"].sum(1, dtype=torch.float64))
    return masked.sum() / batch["loss_mask"].sum(), {"domain_sums": sums}
