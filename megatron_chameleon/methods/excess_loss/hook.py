"""DoReMi's proxy: before each step its losses are compared with those of a frozen reference.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.watched_proxy import require_same_rule, state_arrays
from megatron_chameleon.methods.excess_loss.reference import Reference
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doremi import DoremiRecipe, DoremiState, token_weights
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.memory import TrainingSetup, stage_parameters
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.global_batch import GlobalBatch, TokenValues
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.passes import Passes
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.trained_model import batch_shape
from megatron_chameleon.training.way_out import WayOut


class ExcessLossReweighting(TrainingHook):
    """Weighs the loss of domains by their excess losses.

    Samples are drawn by the run's mixture throughout; only what their loss counts changes. Proxy
    and reference go forward over the global batch, and the step is trained with the new weights.

    Args:
        plan: of the proxy's run.
        layout: of the ranks; the reference is spread over them as the proxy is.
        reference: to compare with. It computes in the precision that the proxy is trained in.
        recipe: of the update rule.
    """

    def __init__(
        self, plan: TrainingPlan, layout: Layout, reference: Reference, recipe: DoremiRecipe
    ) -> None:
        super().__init__()
        self._plan, self._layout = plan, layout
        self._names, self._recipe, self._reference = plan.data.names, recipe, reference
        sampling = np.array(plan.schedule.weights_at(0), np.float64)
        self._sampling = sampling / sampling.sum()
        self._passes: Passes | None = None
        self._standing = DoremiState.first(len(self._names), plan.shape.vocab_size, recipe)

    def prepare(self) -> None:
        """Build and load the reference."""
        self._passes = _passes_of(self._reference, self._plan, self._layout)

    def extra_bytes(self, setup: TrainingSetup, stage: int, num_domains: int) -> dict[str, int]:
        """The reference's weights, in the precision that the proxy is trained in."""
        its = dataclasses.replace(setup, shape=self._reference.shape)
        return {"the reference": stage_parameters(its, stage) * setup.element_bytes}

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor:
        """Move the weights by the excess losses of ``batch``; then its tokens count by them.

        Raises:
            UserError: on every rank, if a loss of the reference is not finite.
        """
        assert self._passes is not None, "prepare() builds the reference"
        mine = batch.token_losses()
        theirs = batch.token_losses(self._passes, self._reference.shape)
        excess = batch.domain_sums(self._clipped(mine, theirs))
        # Before they are clipped, which hides an infinite loss. Losses are not negative, so neither
        # model's hides the other's.
        losses = batch.domain_sums([a + b for a, b in zip(mine, theirs, strict=True)])
        totals = torch.stack([excess, batch.domain_tokens, losses]).cpu().numpy()
        sums, tokens = totals[:2]
        if np.isfinite(totals).all():
            self._standing = self._standing.after(sums, tokens, self._recipe)
        else:  # of the proxy: the step will be skipped, as it would be without a hook
            self._require_finite(batch, theirs)
        weights = token_weights(self._standing.log_weights, self._sampling, tokens)
        return to_device(torch.from_numpy(weights), excess.device)

    def metrics(self) -> dict[str, Any]:
        """The weights after the last step, their mean, and the excess losses in nats."""
        standing = self._standing
        return {
            "weights": self._named(standing.weights),
            "mean_weights": self._named(standing.mean),
            "excess": self._named(standing.excess),
            "moved": standing.moved,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the weights stand, and what they were found with."""
        return {
            **self._found_with(),
            "log_weights": self._standing.log_weights.tolist(),
            "excess": self._standing.excess.tolist(),
            "mean": self._standing.mean.tolist(),
            "counted": self._standing.counted,
            "moved": self._standing.moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            UserError: if it was found with another rule or reference, or is damaged.
        """
        way_out = self._plan.way_out
        require_found_with(state, self._recipe, self._reference, way_out)
        self._standing = standing_of(state, len(self._names), way_out)

    def _found_with(self) -> dict[str, Any]:
        return found_with(self._recipe, self._reference)

    def _named(self, values: Array) -> dict[str, float]:
        return dict(zip(self._names, values.tolist(), strict=True))

    def _clipped(self, mine: TokenValues, theirs: TokenValues) -> list[torch.Tensor]:
        """How far each token's loss is above the reference's, [b, s] float32 a micro-batch."""
        pairs = zip(mine, theirs, strict=True)
        if not self._recipe.clip_tokens:
            return [proxy - reference for proxy, reference in pairs]
        floor, ceiling = self._recipe.floor, self._recipe.ceiling
        return [(proxy - reference).clamp(floor, ceiling) for proxy, reference in pairs]

    def _require_finite(self, batch: GlobalBatch, theirs: TokenValues) -> None:
        sums = batch.domain_sums(theirs).cpu().numpy()
        for name, total in zip(self._names, sums, strict=True):
            if not np.isfinite(total):
                raise UserError(
                    f"the reference {self._reference.checkpoint.root} has a loss that is not a "
                    f"finite number on '{name}', so nothing can be compared with it; take another "
                    "one, such as one that is trained by a lower --lr"
                )


def found_with(recipe: DoremiRecipe, reference: Reference) -> dict[str, Any]:
    """What a state depends on beside the run, as JSON values."""
    return {"rule": dataclasses.asdict(recipe), "reference": reference.checkpoint.hash}


def require_found_with(
    state: dict[str, Any], recipe: DoremiRecipe, reference: Reference, way_out: WayOut
) -> None:
    """Raises UserError if ``state`` was found with another rule or reference."""
    wanted = found_with(recipe, reference)
    require_same_rule(state["rule"], wanted["rule"], way_out)
    if state["reference"] != wanted["reference"]:
        raise UserError(
            f"the proxy was compared with another reference than {reference.checkpoint.root}; "
            f"{way_out}"
        )


def standing_of(state: dict[str, Any], num_domains: int, way_out: WayOut) -> DoremiState:
    """The weights of what :meth:`ExcessLossReweighting.state_dict` gave.

    Raises:
        UserError: if they are not those of so many domains.
    """
    shapes = dict.fromkeys(("log_weights", "excess", "mean"), (num_domains,))
    arrays = state_arrays(state, shapes, way_out)
    return DoremiState(**arrays, counted=state["counted"], moved=state["moved"])


def _passes_of(reference: Reference, plan: TrainingPlan, layout: Layout) -> Passes:
    """The reference's part on this rank, frozen."""
    options = plan.options
    model: Sequence[torch.nn.Module] = build_model_chunks(
        reference.shape,
        layout,
        options.seed,
        bf16=options.bf16,
        deterministic=options.deterministic and layout.device.type == "cuda",
    )
    load_weights(reference.checkpoint, model)
    for chunk in model:
        chunk.eval().requires_grad_(False)
    return Passes(model, batch_shape(plan, layout), len(plan.data.names))
