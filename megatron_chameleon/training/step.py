"""One optimizer step over one global batch, under any layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_chameleon.blend.boundaries import document_mask
from megatron_chameleon.blend.sampler import Batch

# What schedules take: a loss and what is kept of it, with the number of tokens between the two
# where the loss is a sum over them.
Loss = tuple[torch.Tensor, Batch] | tuple[torch.Tensor, torch.Tensor, Batch]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step left behind.

    Attributes:
        domain_sums: [k, 3] in float64 over this rank's micro-batches: per domain, summed loss,
            tokens that have one, and tokens drawn; zero on ranks that are not in the last pipeline
            stage.
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
    """Forward, backward and update.

    ``batches`` yields this rank's micro-batches. Where some of their tokens have no loss, build
    the model with ``per_token_loss``.
    """
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
    domain_sums = torch.zeros(num_domains, 3, dtype=torch.float64, device=device)
    for output in outputs:  # empty but on the last pipeline stage
        domain_sums += output["domain_sums"]
    return StepResult(domain_sums, float(grad_norm or 0.0))


def _forward_step(
    num_domains: int, batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """The model's output, and the function that turns it into a loss, as schedules ask."""
    device = next(model.parameters()).device
    batch = {name: part.to(device) for name, part in next(batches).items()}
    starts = batch.get("document_starts")
    mask = None if starts is None else document_mask(starts)
    token_losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    loss = _summed_loss if get_model_config(model).calculate_per_token_loss else _mean_loss
    return token_losses, functools.partial(loss, batch, num_domains)


def _mean_loss(batch: Batch, num_domains: int, token_losses: torch.Tensor) -> Loss:
    """Mean over the micro-batch's tokens, and sums per domain for the log.

    Every window is full, so the mean of the micro-batches' means is the global batch's mean.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    sums = _domain_sums(batch, num_domains, masked)
    return masked.sum() / batch["loss_mask"].sum(), {"domain_sums": sums}


def _summed_loss(batch: Batch, num_domains: int, token_losses: torch.Tensor) -> Loss:
    """Sum over the micro-batch's tokens, how many they are, and sums per domain for the log.

    Megatron divides the gradient by the tokens of all micro-batches and data-parallel ranks. A
    micro-batch, and even a step, may have none.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    sums = _domain_sums(batch, num_domains, masked)
    return masked.sum(), batch["loss_mask"].sum().to(torch.int32), {"domain_sums": sums}


def _domain_sums(batch: Batch, num_domains: int, masked: torch.Tensor) -> torch.Tensor:
    """[k, 3] float64 of the losses [b, s]: summed loss, tokens with one and tokens drawn."""
    counted = batch["loss_mask"].sum(1, dtype=torch.float64)
    drawn = torch.full_like(counted, masked.size(1))
    parts = torch.stack([masked.detach().sum(1, dtype=torch.float64), counted, drawn], dim=1)
    sums = torch.zeros(num_domains, 3, dtype=torch.float64, device=masked.device)
    return sums.index_add_(0, batch["domain"], parts)
