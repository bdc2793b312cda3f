"""The passes of a step that a hook watches, in place of the plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.domain_gradients import (
    DomainGradients,
    Split,
    micro_batches_by_domain,
    split_samples,
)
from megatron_chameleon.training.global_batch import GlobalBatch
from megatron_chameleon.training.gradient_rows import GradientRows
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.passes import Passes


class HookedPasses:
    """Gathers a step's micro-batches, shows them to a hook, and makes the gradient it asks for.

    Args:
        hook: which watches. Where it combines gradients, room for one of each domain is taken here.
        passes: of the model that is trained, built with ``per_token_loss`` where the hook combines
            gradients.
        shape: of that model.
        layout: of the ranks.
    """

    def __init__(
        self, hook: TrainingHook, passes: Passes, shape: ModelShape, layout: Layout
    ) -> None:
        self._hook, self._passes, self._shape, self._layout = hook, passes, shape, layout
        # Chunks that are trained are wrapped for data parallelism.
        model: Sequence[DistributedDataParallel] = passes.model
        self._rows = GradientRows(model, passes.num_domains) if hook.combines_gradients else None

    def forward_backward(
        self, batches: Iterator[Batch], step: int, learning_rate: float
    ) -> torch.Tensor:
        """As :meth:`Passes.forward_backward`, over the next global batch.

        Args:
            batches: this rank's micro-batches.
            step: steps done before this one.
            learning_rate: of the update that the passes are for.
        """
        num_microbatches = self._passes.shape.num_microbatches
        micro_batches = list(itertools.islice(batches, num_microbatches))
        batch = GlobalBatch(
            step, micro_batches, self._passes, self._shape, self._layout, self._spend
        )
        weights = self._hook.loss_weights(batch)
        if self._hook.combines_gradients:
            return self._combined(batch, weights, learning_rate)
        return self._passes.forward_backward(iter(micro_batches), loss_weights=weights)

    def _combined(
        self, batch: GlobalBatch, loss_weights: torch.Tensor | None, learning_rate: float
    ) -> torch.Tensor:
        """Each domain's gradient on its own, then their sum by the hook's weights."""
        assert self._rows is not None
        model: Sequence[DistributedDataParallel] = self._passes.model
        gradients = DomainGradients(self._rows, batch.domain_tokens, learning_rate)
        sums = torch.zeros(batch.num_domains, 3, dtype=torch.float64, device=self._passes.device)
        rows = _rows_by_domain(batch)
        splits = {domain: self._split(len(rows[domain])) for domain in gradients.present}
        parts = micro_batches_by_domain(batch.micro_batches, dict(enumerate(rows)), splits)
        for domain, split in splits.items():
            for chunk in model:
                chunk.zero_grad_buffer()
            sums += self._passes.forward_backward(
                iter(parts[domain]), split.count, loss_weights, split.size
            )
            gradients.keep(domain)
        gradients.combine(self._hook.gradient_weights(gradients))
        self._spend_on_filling(
            batch, [(split, len(rows[domain])) for domain, split in splits.items()]
        )
        if self._layout.is_last_stage:
            sums[:, 2] = self._drawn([len(own) for own in rows])
        return sums

    def _split(self, samples: int) -> Split:
        """How so many samples of one domain go through this layout's stages."""
        stages = self._layout.pipeline_size
        interleaved = len(self._passes.model) > 1
        largest = self._passes.shape.micro_batch_size
        return split_samples(samples, largest, stages, stages if interleaved else 1)

    def _drawn(self, samples: Sequence[int]) -> torch.Tensor:
        """[k] tokens of this rank's samples, without those that fill up."""
        tokens = torch.tensor(samples) * self._passes.shape.seq_length
        return to_device(tokens, self._passes.device)

    def _spend(self, flops: float) -> None:
        self._hook.flops += flops

    def _spend_on_filling(self, batch: GlobalBatch, splits: Sequence[tuple[Split, int]]) -> None:
        """Samples without a loss cost as much as others.

        Args:
            batch: the step's.
            splits: for each domain whose gradient is taken, how its samples on this rank are cut,
                and how many they are.
        """
        mine = sum(split.filled - samples for split, samples in splits)
        filling = batch.sum_over_data_ranks(mine)
        length = self._passes.shape.seq_length
        self._spend(training_flops(self._shape, filling * length, length))


def _rows_by_domain(batch: GlobalBatch) -> list[list[int]]:
    """For each domain, which of this rank's samples are its; one read from the device."""
    rows: list[list[int]] = [[] for _ in range(batch.num_domains)]
    for row, domain in enumerate(torch.cat([p["domain"] for p in batch.micro_batches]).tolist()):
        rows[domain].append(row)
    return rows
