"""The passes of a step that a hook watches, in place of the plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.domain_gradients import (
    DomainGradients,
    micro_batches_of_rows,
    samples_run,
)
from megatron_chameleon.training.global_batch import GlobalBatch
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.passes import Passes


class HookedPasses:
    """Gathers a step's micro-batches, shows them to a hook, and makes the gradient it asks for.

    Args:
        hook: which watches.
        passes: of the model that is trained, built with ``per_token_loss`` where the hook combines
            gradients.
        shape: of that model.
        layout: of the ranks.
    """

    def __init__(
        self, hook: TrainingHook, passes: Passes, shape: ModelShape, layout: Layout
    ) -> None:
        self._hook, self._passes, self._shape, self._layout = hook, passes, shape, layout

    def forward_backward(self, batches: Iterator[Batch], step: int) -> torch.Tensor:
        """As :meth:`Passes.forward_backward`, over the next global batch.

        Args:
            batches: this rank's micro-batches.
            step: steps done before this one.
        """
        num_microbatches = self._passes.shape.num_microbatches
        micro_batches = list(itertools.islice(batches, num_microbatches))
        batch = GlobalBatch(
            step, micro_batches, self._passes, self._shape, self._layout, self._spend
        )
        weights = self._hook.loss_weights(batch)
        if self._hook.combines_gradients:
            return self._combined(batch, weights)
        return self._passes.forward_backward(iter(micro_batches), loss_weights=weights)

    def _combined(self, batch: GlobalBatch, loss_weights: torch.Tensor | None) -> torch.Tensor:
        """Each domain's gradient on its own, then their sum by the hook's weights."""
        # Chunks that are trained are wrapped for data parallelism.
        model: Sequence[DistributedDataParallel] = self._passes.model
        gradients = DomainGradients(model, batch.domain_tokens)
        sums = torch.zeros(batch.num_domains, 3, dtype=torch.float64, device=self._passes.device)
        rows = _rows_by_domain(batch)
        for domain in gradients.present:
            for chunk in model:
                chunk.zero_grad_buffer()
            parts = micro_batches_of_rows(
                batch.micro_batches,
                rows[domain],
                self._passes.shape.micro_batch_size,
                self._unit(),
            )
            sums += self._passes.forward_backward(iter(parts), len(parts), loss_weights)
            gradients.keep(domain)
        gradients.combine(self._hook.gradient_weights(gradients))
        self._spend_on_filling(batch, [len(rows[domain]) for domain in gradients.present])
        if self._layout.is_last_stage:
            sums[:, 2] = self._drawn([len(own) for own in rows])
        return sums

    def _unit(self) -> int:
        """Of what the samples of a domain have to be a multiple."""
        if self._layout.pipeline_size == 1:
            return 1
        # Interleaved stages take turns over as many micro-batches as there are stages.
        interleaved = len(self._passes.model) > 1
        rounds = self._layout.pipeline_size if interleaved else 1
        return self._passes.shape.micro_batch_size * rounds

    def _drawn(self, samples: Sequence[int]) -> torch.Tensor:
        """[k] tokens of this rank's samples, without those that fill up."""
        tokens = torch.tensor(samples) * self._passes.shape.seq_length
        return tokens.to(self._passes.device, non_blocking=True)

    def _spend(self, flops: float) -> None:
        self._hook.flops += flops

    def _spend_on_filling(self, batch: GlobalBatch, samples: Sequence[int]) -> None:
        """Samples without a loss cost as much as others.

        Args:
            batch: the step's.
            samples: this rank's, of each domain whose gradient is taken.
        """
        mine = sum(samples_run(count, self._unit()) - count for count in samples)
        filling = batch.sum_over_data_ranks(mine)
        length = self._passes.shape.seq_length
        self._spend(training_flops(self._shape, filling * length, length))


def _rows_by_domain(batch: GlobalBatch) -> list[list[int]]:
    """For each domain, which of this rank's samples are its; one read from the device."""
    rows: list[list[int]] = [[] for _ in range(batch.num_domains)]
    for row, domain in enumerate(torch.cat([p["domain"] for p in batch.micro_batches]).tolist()):
        rows[domain].append(row)
    return rows
