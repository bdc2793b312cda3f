"""Forward and backward passes over one global batch, and their losses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_chameleon.blend.boundaries import document_mask
from megatron_chameleon.blend.sampler import (
    Batch,
    SampleSource,
    check_batch_sizes,
    micro_batches,
)
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.options import DocumentAttention, ModelOptions

# Return value of a loss function in Megatron's schedules: (loss, logged tensors) for a mean,
# (loss, number of tokens, logged tensors) for a sum over tokens.
Loss = tuple[torch.Tensor, Batch] | tuple[torch.Tensor, torch.Tensor, Batch]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one step.

    Attributes:
        domain_sums: [k, 3] float64 over this rank's micro-batches: per domain, summed loss, number
            of tokens with a loss, and tokens sampled; zero outside the last pipeline stage,
            identical on tensor-parallel ranks.
        grad_norm: global gradient norm before clipping.
        skip_reason: why the step did not update the model; None if it did.
    """

    domain_sums: torch.Tensor
    grad_norm: float
    skip_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Micro-batches of a global batch on each data-parallel rank."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int

    @classmethod
    def of(cls, options: ModelOptions, data_parallel_size: int) -> BatchShape:
        """Split the global batch of ``options`` among ``data_parallel_size`` ranks.

        Raises:
            UserError: if the ranks cannot share the batch equally, or the pipeline schedule cannot
                run that many micro-batches.
        """
        check_batch_sizes(options.global_batch_size, options.micro_batch_size, data_parallel_size)
        count = options.global_batch_size // (options.micro_batch_size * data_parallel_size)
        options.parallel.check_microbatches(count)
        return cls(count, options.micro_batch_size, options.seq_length)

    def micro_batches(
        self, samples: SampleSource, layout: Layout, start_step: int = 0
    ) -> Iterator[Batch]:
        """This rank's micro-batches of ``samples``, from ``start_step`` on."""
        size, ranks = self.micro_batch_size, layout.data_size
        step_size = self.num_microbatches * size * ranks
        return micro_batches(samples, step_size, size, layout.data_rank, ranks, start_step)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward passes of this rank's model.

    Attributes:
        model: model chunks, one per virtual pipeline stage of this rank; wrapped in
            DistributedDataParallel if they are trained.
        shape: shape of the batch.
        num_domains: number of domains (k).
        loss_weights: [k] weights of the domains' token losses (``--loss-weights``), which multiply
            those of a hook; None if all are 1.
        document_attention: how a GPU separates documents, if batches have document_starts.
    """

    model: Sequence[torch.nn.Module]
    shape: BatchShape
    num_domains: int
    loss_weights: torch.Tensor | None = None
    document_attention: DocumentAttention = "dense"

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model[0].parameters()).device

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the model has an embedding for."""
        return unwrap(self.model[0]).real_vocab_size

    def forward_backward(
        self,
        batches: Iterator[Batch],
        num_microbatches: int | None = None,
        loss_weights: torch.Tensor | None = None,
        micro_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Add the gradient of the mean loss to the gradient buffers, reduced over the ranks.

        Args:
            batches: this rank's micro-batches. If some of their tokens are masked, the model must
                be built with ``per_token_loss``.
            num_microbatches: number of micro-batches; by default, the number in a step.
            loss_weights: [k] a hook's weight of the loss of each domain's tokens; by default 1.
            micro_batch_size: samples per micro-batch; by default, the number in a step. Without
                pipeline parallelism, micro-batches may also be smaller.

        Returns:
            [k, 3] float64 over this rank's micro-batches: per domain, summed loss, number of tokens
            with a loss, and tokens sampled; zero outside the last pipeline stage.
        """
        if self.loss_weights is not None:
            own = self.loss_weights
            loss_weights = own if loss_weights is None else own * loss_weights.to(own)
        loss = functools.partial(
            micro_batch_loss,
            num_domains=self.num_domains,
            loss_weights=loss_weights,
            per_token=get_model_config(self.model[0]).calculate_per_token_loss,
        )
        outputs = self._run(
            batches, num_microbatches, loss, forward_only=False, micro_batch_size=micro_batch_size
        )
        sums = torch.zeros(self.num_domains, 3, dtype=torch.float64, device=self.device)
        for output in outputs:  # empty except on the last pipeline stage
            sums += output["domain_sums"]
        return sums

    def token_losses(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Per-token losses of each micro-batch, forward only and without dropout.

        Returns:
            [b, s] float32 per micro-batch on the last pipeline stage; an empty list elsewhere.
        """

        def keep(_batch: Batch, losses: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            assert non_loss_data
            return losses.detach().float()

        modes = [chunk.training for chunk in self.model]
        for chunk in self.model:
            chunk.eval()
        try:
            with torch.no_grad():
                return self._run(iter(batches), len(batches), keep, forward_only=True)
        finally:
            for chunk, is_training in zip(self.model, modes, strict=True):
                chunk.train(is_training)

    def _run(
        self,
        batches: Iterator[Batch],
        num_microbatches: int | None,
        loss: Callable[..., Any],
        *,
        forward_only: bool,
        micro_batch_size: int | None = None,
    ) -> list[Any]:
        flex_attention = self.document_attention == "flex" and self.device.type == "cuda"
        # Megatron's schedules need one iterator over the same micro-batches for each model chunk.
        # Every chunk reads all micro-batches of a step, so the next step may call ``tee`` on
        # ``batches`` again.
        chunks = len(self.model)
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, loss, flex_attention),
            data_iterator=batches if chunks == 1 else list(itertools.tee(batches, chunks)),
            model=list(self.model),
            num_microbatches=num_microbatches or self.shape.num_microbatches,
            seq_length=self.shape.seq_length,
            micro_batch_size=micro_batch_size or self.shape.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs


def _forward_step(
    loss: Callable[..., Any], flex_attention: bool, batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """``forward_step_func`` of Megatron's schedules: the model's output and its loss function."""
    device = next(model.parameters()).device
    batch = {name: part.to(device, non_blocking=True) for name, part in next(batches).items()}
    starts = batch.get("document_starts")
    mask = starts if starts is None or flex_attention else document_mask(starts)
    token_losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return token_losses, functools.partial(loss, batch)


def micro_batch_loss(
    batch: Batch,
    token_losses: torch.Tensor,
    num_domains: int,
    loss_weights: torch.Tensor | None = None,
    *,
    per_token: bool,
) -> Loss:
    """Loss of a micro-batch as Megatron's schedules expect it, and per-domain sums for the log.

    Args:
        batch: a micro-batch, with loss_mask [b, s] and domain [b].
        token_losses: [b, s], the loss of each token.
        num_domains: number of domains (k).
        loss_weights: [k] weight of the loss of each domain's tokens; by default 1. The logged sums
            are unweighted.
        per_token: whether to return the summed loss and the number of tokens, which may be 0.
            Megatron then divides the gradient by the number of tokens of all micro-batches and
            data-parallel ranks. If False, the mean is returned; without masked tokens, all
            micro-batches have the same number of tokens, so the mean over micro-batches is the mean
            over the global batch.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    logged = {"domain_sums": domain_sums(batch, num_domains, masked)}
    if loss_weights is not None:
        masked = masked * loss_weights.to(masked)[batch["domain"]][:, None]
    num_tokens = batch["loss_mask"].sum()
    if per_token:
        return masked.sum(), num_tokens.to(torch.int32), logged
    return masked.sum() / num_tokens, logged


def domain_sums(batch: Batch, num_domains: int, masked: torch.Tensor) -> torch.Tensor:
    """Sum masked losses [b, s] per domain: [k, 3] float64, with the columns of StepResult."""
    counted = batch["loss_mask"].sum(1, dtype=torch.float64)
    sampled = torch.full_like(counted, masked.size(1))
    parts = torch.stack([masked.detach().sum(1, dtype=torch.float64), counted, sampled], dim=1)
    sums = torch.zeros(num_domains, 3, dtype=torch.float64, device=masked.device)
    return sums.index_add_(0, batch["domain"], parts)


def finalize_gradients(
    model: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None,
    *,
    pg_collection: ProcessGroupCollection,
    force_all_reduce: bool = False,
) -> None:
    """Bitwise equivalent of megatron's ``finalize_model_grads`` without device synchronization.

    Up to 0.17, megatron's function synchronizes once per chunk, to check on the host whether the
    token count is zero. Remove this function once 0.18 is the oldest supported release.

    Args:
        model: this rank's model chunks.
        num_tokens: int32 scalar on the device, tokens with a loss in this rank's micro-batches,
            counted on the last pipeline stage; None if losses are means. The tensor is overwritten.
        pg_collection: process groups, passed by the schedules.
        force_all_reduce: all-reduce gradients even if they would be reduce-scattered.
    """
    finalize_model_grads(model, None, pg_collection, force_all_reduce)
    if num_tokens is None:
        return
    pipeline = pg_collection.pp
    dist.broadcast(num_tokens, src=get_pp_last_rank(pipeline), group=pipeline)
    dist.all_reduce(num_tokens, group=pg_collection.dp_cp)
    scale = 1.0 / num_tokens.clamp(min=1)  # without tokens, zero gradients must not become NaN
    for chunk in model:
        chunk.scale_gradients(scale)


def counts_losses(layout: Layout) -> bool:
    """Whether sums over ranks include this rank's losses.

    Tensor-parallel ranks have identical losses, so only the first tensor-parallel rank is included.
    """
    return layout.is_last_stage and layout.tensor_rank == 0
