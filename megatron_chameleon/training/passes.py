"""Forward and backward passes of one global batch, under any layout."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_chameleon.blend.boundaries import document_mask
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.training.losses import mean_loss, summed_loss


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """How the global batch is cut up on each data-parallel rank."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


@dataclasses.dataclass(frozen=True)
class Passes:
    """This rank's model, and how micro-batches go through it.

    Attributes:
        model: chunks, one for each virtual pipeline stage of this rank; those that are trained are
            wrapped for data parallelism.
        shape: of the batch.
        num_domains: domains that samples are numbered by (k).
    """

    model: Sequence[torch.nn.Module]
    shape: BatchShape
    num_domains: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model[0].parameters()).device

    def forward_backward(
        self,
        batches: Iterator[Batch],
        num_microbatches: int | None = None,
        loss_weights: torch.Tensor | None = None,
        micro_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Add the gradient of the mean loss to the gradient buffers, reduced over the ranks.

        Args:
            batches: this rank's micro-batches. Where some of their tokens have no loss, the model
                has to be built with ``per_token_loss``.
            num_microbatches: how many to take; by default those of a step.
            loss_weights: [k] what a token's loss counts, by its domain; by default 1.
            micro_batch_size: samples of each; by default those of a step's. One stage alone takes
                fewer too.

        Returns:
            [k, 3] float64 over this rank's micro-batches: per domain, summed loss, tokens that have
            one, and tokens drawn; zero on ranks that are not in the last pipeline stage.
        """
        per_token = get_model_config(self.model[0]).calculate_per_token_loss
        loss = functools.partial(
            summed_loss if per_token else mean_loss,
            num_domains=self.num_domains,
            loss_weights=loss_weights,
        )
        outputs = self._run(
            batches, num_microbatches, loss, forward_only=False, micro_batch_size=micro_batch_size
        )
        sums = torch.zeros(self.num_domains, 3, dtype=torch.float64, device=self.device)
        for output in outputs:  # empty but on the last pipeline stage
            sums += output["domain_sums"]
        return sums

    def token_losses(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Losses [b, s] in float32 of each micro-batch, forward only.

        Returns:
            A tensor for each micro-batch on the last pipeline stage; nothing on the others.
        """

        def keep(_batch: Batch, losses: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            assert non_loss_data
            return losses.detach().float()

        with torch.no_grad():
            return self._run(iter(batches), len(batches), keep, forward_only=True)

    def _run(
        self,
        batches: Iterator[Batch],
        num_microbatches: int | None,
        loss: Callable[..., Any],
        *,
        forward_only: bool,
        micro_batch_size: int | None = None,
    ) -> list[Any]:
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, loss),
            data_iterator=_for_each_chunk(batches, len(self.model)),
            model=list(self.model),
            num_microbatches=num_microbatches or self.shape.num_microbatches,
            seq_length=self.shape.seq_length,
            micro_batch_size=micro_batch_size or self.shape.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs


def _for_each_chunk(
    batches: Iterator[Batch], chunks: int
) -> Iterator[Batch] | list[Iterator[Batch]]:
    """What schedules take: an iterator for each chunk; all of them yield the same micro-batches.

    A step leaves none of its micro-batches unread by any chunk, so the next step may split
    ``batches`` anew.
    """
    return batches if chunks == 1 else list(itertools.tee(batches, chunks))


def _forward_step(
    loss: Callable[..., Any], batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The model's output, and the function that turns it into a loss, as schedules ask."""
    device = next(model.parameters()).device
    batch = {name: part.to(device, non_blocking=True) for name, part in next(batches).items()}
    starts = batch.get("document_starts")
    mask = None if starts is None else document_mask(starts)
    token_losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return token_losses, functools.partial(loss, batch)
