"""DoReMi's training hook: weigh domains by the excess loss of the proxy over a frozen reference.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.blend.sampler import to_device
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.proxy import MeanWeightsHook
from megatron_chameleon.mixture.doremi import DoremiRecipe, DoremiState, token_weights
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.hook import GlobalBatch
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import BatchShape, Passes


@dataclasses.dataclass(frozen=True)
class Reference:
    """The last checkpoint of the reference, and its model shape."""

    checkpoint: CheckpointRecord
    shape: ModelShape

    def settings(self, recipe: DoremiRecipe) -> dict[str, Any]:
        """JSON values that the hook's state depends on, in addition to the options of the run."""
        return {"rule": dataclasses.asdict(recipe), "reference": self.checkpoint.hash}


class ExcessLossReweighting(MeanWeightsHook[DoremiState]):
    """Weigh the loss of each domain by its excess loss.

    Samples always follow the run's mixture; only their loss weights change. Proxy and reference run
    forward over the global batch, and the step is trained with the updated weights.

    Args:
        plan: plan of the proxy's run.
        layout: layout of the ranks; the reference is sharded like the proxy. None to read a saved
            state.
        reference: the reference, which computes in the precision of the proxy.
        recipe: parameters of the update rule.
    """

    def __init__(
        self, plan: TrainingPlan, layout: Layout | None, reference: Reference, recipe: DoremiRecipe
    ) -> None:
        names = plan.data.names
        first = DoremiState.first(len(names), plan.shape.vocab_size, recipe)
        super().__init__(names, range(len(names)), first, reference.settings(recipe))
        self._plan, self._layout = plan, layout
        self._recipe, self._reference = recipe, reference
        sampling = np.array(plan.schedule.weights_at(0), np.float64)
        self._sampling = sampling / sampling.sum()
        self._passes: Passes | None = None

    def prepare(self) -> None:
        """Build the frozen reference and load its weights."""
        options, layout = self._plan.options, self._layout
        assert layout is not None
        model: Sequence[torch.nn.Module] = build_model_chunks(
            self._reference.shape,
            layout,
            options.seed,
            bf16=options.bf16,
            deterministic=options.deterministic and layout.device.type == "cuda",
        )
        load_weights(self._reference.checkpoint, model)
        for chunk in model:
            chunk.eval().requires_grad_(False)
        shape = BatchShape.of(options, layout.data_size)
        self._passes = Passes(model, shape, len(self.names))

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor:
        """Update the weights by the excess losses of ``batch``, and weigh its tokens by them.

        Raises:
            UserError: on every rank, if a loss of the reference is not finite.
        """
        assert self._passes is not None, "prepare() builds the reference"
        recipe, proxy = self._recipe, batch.token_losses()
        reference = batch.token_losses(self._passes, self._reference.shape)
        pairs = list(zip(proxy, reference, strict=True))
        excess = [mine - theirs for mine, theirs in pairs]
        if recipe.clip_tokens:
            excess = [each.clamp(recipe.floor, recipe.ceiling) for each in excess]
        sums = batch.domain_sums(excess)
        # Check losses before clipping, which would hide an infinite one. Losses are not negative:
        # the sum over both models is infinite if either is.
        losses = batch.domain_sums([mine + theirs for mine, theirs in pairs])
        totals = torch.stack([sums, batch.domain_tokens, losses]).cpu().numpy()
        tokens = totals[1]
        if np.isfinite(totals).all():
            self.state = self.state.after(totals[0], tokens, recipe)
        else:  # for the proxy, the guard skips the step
            finite = np.isfinite(batch.domain_sums(reference).cpu().numpy())
            if not finite.all():
                raise UserError(
                    f"the reference {self._reference.checkpoint.root} has a loss that is not "
                    f"finite on '{self.names[int(finite.argmin())]}'; use another one, for "
                    "example trained with a lower --lr"
                )
        weights = token_weights(self.state.log_weights, self._sampling, tokens)
        return to_device(torch.from_numpy(weights), sums.device)

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and excess losses in nats per token."""
        excess = dict(zip(self.names, self.state.excess.tolist(), strict=True))
        return {**super().metrics(), "excess": excess}
