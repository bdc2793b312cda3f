"""A step's global batch, as a hook may look at it before the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.passes import Passes

TokenValues = Sequence[torch.Tensor]
"""A value per token of this rank's micro-batches, [b, s] each; empty but on the last stage."""


class GlobalBatch:
    """This rank's micro-batches of a step, which can be gone through as often as wanted.

    Values per token lie on the last pipeline stage, spread over the data-parallel ranks; sums over
    them are the same on every rank.

    Args:
        step: steps done before this one.
        micro_batches: this rank's, as the model takes them.
        passes: the model that is trained.
        shape: of that model.
        layout: of the ranks.
        spend: is told the floating-point operations of all ranks together, as they are spent.
    """

    def __init__(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        passes: Passes,
        shape: ModelShape,
        layout: Layout,
        spend: Callable[[float], None],
    ) -> None:
        self.step, self.micro_batches = step, list(micro_batches)
        self._passes, self._shape, self._layout, self._spend = passes, shape, layout, spend

    @property
    def num_domains(self) -> int:
        """How many domains there are (k)."""
        return self._passes.num_domains

    @property
    def num_tokens(self) -> int:
        """Tokens drawn, over all ranks."""
        mine = sum(batch["tokens"].numel() for batch in self.micro_batches)
        return mine * self._layout.data_size

    def token_losses(
        self, other: Passes | None = None, other_shape: ModelShape | None = None
    ) -> list[torch.Tensor]:
        """The loss of every token, forward only, by the model or by another of the same layout.

        Args:
            other: passes of a reference model, say; by default of the model that is trained.
            other_shape: of that model, for the cost.
        """
        shape = other_shape or self._shape
        self._spend(forward_flops(shape, self.num_tokens, self._passes.shape.seq_length))
        return (other or self._passes).token_losses(self.micro_batches)

    def domain_sums(self, values: TokenValues) -> torch.Tensor:
        """[k] float64: ``values`` of the tokens that have a loss, summed by domain over all ranks.

        Args:
            values: as :meth:`token_losses` gives them, or made of those.
        """
        sums = self._zeros()
        # There are none but on the last stage.
        for batch, value in zip(self.micro_batches, values, strict=bool(values)):
            masked = value.double() * batch["loss_mask"].to(value.device)
            sums.index_add_(0, batch["domain"].to(value.device), masked.sum(1))
        return self._over_ranks(sums, self._layout.is_last_stage)

    @functools.cached_property
    def domain_tokens(self) -> torch.Tensor:
        """[k] float64: tokens that have a loss, by domain over all ranks."""
        counts = self._zeros()
        for batch in self.micro_batches:
            tokens = batch["loss_mask"].sum(1, dtype=torch.float64)
            counts.index_add_(0, batch["domain"].to(counts.device), tokens.to(counts.device))
        return self._over_ranks(counts, self._layout.is_last_stage)

    def sum_over_data_ranks(self, number: int) -> int:
        """A number that each data-parallel rank has of its own, summed; the same on every rank."""
        mine = torch.full((1,), number, dtype=torch.int64, device=self._passes.device)
        return int(self._over_ranks(mine, self._layout.is_last_stage))

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.num_domains, dtype=torch.float64, device=self._passes.device)

    def _over_ranks(self, values: torch.Tensor, spoken: bool) -> torch.Tensor:
        # Tensor-parallel ranks hold the same values: the first of them speaks.
        if not spoken or self._layout.tensor_rank > 0:
            values = torch.zeros_like(values)
        dist.all_reduce(values)
        return values
