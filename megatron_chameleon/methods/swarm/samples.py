"""What a group of members is trained on and measured on."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch, MicroBatchIterator
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import DomainData, TokenData, corpus_tokens
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText
from megatron_chameleon.methods.swarm.plan import SwarmPlan
from megatron_chameleon.methods.swarm.stacked_gpt import StackedGPT
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.training.validation import held_out_text


@dataclasses.dataclass(frozen=True)
class OpenedDomain(DomainData):
    """A domain whose files have been opened and checked, once for all members."""

    file: TokenFile | None = None

    def open(self) -> TokenFile:
        """The files."""
        assert self.file is not None
        return self.file


def opened(data: TokenData) -> TokenData:
    """``data`` with its files open, so that each of many members need not check them again."""
    domains = [OpenedDomain(**vars(domain), file=domain.open()) for domain in data.domains]
    return dataclasses.replace(data, domains=tuple(domains))


class GroupBatches(Iterator[Batch]):
    """The members' micro-batches, stacked, in the order in which a run of each would see them.

    Each is tokens [E, b, s] and labels [E, b, s], int64.

    Args:
        samples: of each member [E].
        global_batch_size: sequences of each member in a step.
        micro_batch_size: sequences of each member in a micro-batch (b).
        start_step: the step whose first micro-batch comes first.
    """

    def __init__(
        self,
        samples: Sequence[BlendedTokens],
        global_batch_size: int,
        micro_batch_size: int,
        start_step: int,
    ) -> None:
        self._of_members = [
            MicroBatchIterator(each, global_batch_size, micro_batch_size, start_step=start_step)
            for each in samples
        ]

    def __next__(self) -> Batch:
        batches = [next(samples) for samples in self._of_members]
        return {name: torch.stack([b[name] for b in batches]) for name in ("tokens", "labels")}


def member_samples(plan: SwarmPlan, data: TokenData, member: int) -> BlendedTokens:
    """The samples of one member's training: those of a run with its seed and mixture."""
    options = plan.options
    return BlendedTokens(
        data,
        MixtureSchedule.fixed(plan.mixtures[member].tolist()),
        options.train_iters * options.global_batch_size,
        options.seq_length,
        plan.member_seed(member),
        options.permutation,
    )


class HeldOut:
    """Windows of every domain's valid split, the same ones for all members and measurements.

    Args:
        texts: the windows of each domain; None where it has no text.
        windows_at_once: of a pass.
    """

    def __init__(self, texts: Sequence[HeldOutText | None], windows_at_once: int) -> None:
        self._texts, self._size = texts, windows_at_once

    @property
    def measured(self) -> NDArray[np.bool_]:
        """[k] which domains have text."""
        return np.array([text is not None for text in self._texts])

    @property
    def num_tokens(self) -> int:
        """Tokens that one measurement predicts."""
        return sum(text.num_predictions for text in self._texts if text is not None)

    def losses(self, model: StackedGPT, device: torch.device) -> Array:
        """[E, k] float64, mean loss per token in nats; NaN for a domain without text."""
        columns = [
            torch.full((model.num_members,), torch.nan, dtype=torch.float64, device=device)
            if text is None
            else self._mean_loss(model, text, device)
            for text in self._texts
        ]
        found: Array = torch.stack(columns, dim=1).cpu().numpy()
        return found

    def _mean_loss(
        self, model: StackedGPT, text: HeldOutText, device: torch.device
    ) -> torch.Tensor:
        total = torch.zeros(model.num_members, dtype=torch.float64, device=device)
        with read_ahead(self._batches(text), device) as batches:
            for batch in batches:
                losses = model.token_losses(batch["tokens"], batch["labels"])
                total += losses.double().masked_fill(~batch["mask"], 0.0).sum((1, 2))
        return total / text.num_predictions

    def _batches(self, text: HeldOutText) -> Iterator[Batch]:
        """Windows: tokens, labels and the mask of what counts, [1, b, s] each."""
        for first in range(0, len(text.windows), self._size):
            parts = text.batch(first, min(first + self._size, len(text.windows)))
            names = ("tokens", "labels", "mask")
            yield {name: part[None] for name, part in zip(names, parts, strict=True)}


def open_held_out(plan: SwarmPlan, windows_at_once: int) -> HeldOut:
    """What the members are measured on.

    Raises:
        UserError: if no domain has text in its valid split.
    """
    options, domains = plan.options, corpus_tokens(plan.corpus, "valid").domains
    windows = options.eval_tokens // options.seq_length
    texts = [held_out_text(domain, options.seq_length, windows) for domain in domains]
    empty = [domain.name for domain, text in zip(domains, texts, strict=True) if text is None]
    if len(empty) == len(texts):
        raise UserError(
            f"{plan.corpus.root} has nothing in its valid split to measure a swarm on; preprocess "
            "again with a share for it (--split)"
        )
    if empty:
        warnings.warn(f"no held-out loss of {', '.join(empty)}: no valid split", stacklevel=2)
    return HeldOut(texts, windows_at_once)
