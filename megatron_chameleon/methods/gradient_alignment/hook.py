"""DoGE's proxy: each step it is trained by the domains' gradients, weighed by their alignment.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.watched_proxy import require_same_rule, state_arrays
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doge import (
    DogeRecipe,
    DogeState,
    Roles,
    clip_factors,
    gradient_weights,
)
from megatron_chameleon.training.domain_gradients import DomainGradients
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.way_out import BY_FLAGS, WayOut


class GradientAlignment(TrainingHook):
    """Weighs the gradients of domains by how well they agree with the target's.

    Samples are drawn by the run's mixture throughout; only what their gradients count changes.

    Args:
        names: of the corpus's domains (k).
        recipe: of the update rule.
        roles: of the domains.
        way_out: what to advise where a checkpoint is of another rule or other roles.
    """

    combines_gradients = True

    def __init__(
        self,
        names: Sequence[str],
        recipe: DogeRecipe,
        roles: Roles,
        way_out: WayOut = BY_FLAGS,
    ) -> None:
        super().__init__()
        self._way_out = way_out
        self._names, self._recipe, self._roles = list(names), recipe, roles
        self._standing = DogeState.first(len(names), roles)

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Move the weights by the gradients' inner products; then the gradients count by them.

        Products that are not finite teach nothing: the guard skips the step where a domain that is
        trained on has them.
        """
        products = gradients.dot_products().cpu().numpy()
        present, factors = gradients.present, np.ones(len(self._names))
        if np.isfinite(products).all():
            factors = clip_factors(products, self._recipe.max_norm)
            self._standing = self._standing.after(
                products, present, gradients.learning_rate, self._recipe, self._roles
            )
        weights = gradient_weights(self._standing, factors, present, self._roles)
        return torch.from_numpy(weights)

    def metrics(self) -> dict[str, Any]:
        """The weights after the last step, their mean, and every domain's alignment."""
        standing = self._standing
        return {
            "weights": self._by_name(standing.weights),
            "mean_weights": self._by_name(standing.mean),
            "alignment": dict(zip(self._names, standing.alignment.tolist(), strict=True)),
            "moved": standing.moved,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the weights stand, and what they were found with."""
        standing = dataclasses.asdict(self._standing)
        arrays = {k: v.tolist() for k, v in standing.items() if isinstance(v, np.ndarray)}
        return {**found_with(self._names, self._recipe, self._roles), **standing, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            UserError: if it was found with another rule or target, or is damaged.
        """
        require_found_with(state, self._names, self._recipe, self._roles, self._way_out)
        self._standing = standing_of(state, len(self._names), self._roles, self._way_out)

    def _by_name(self, weights: Array) -> dict[str, float]:
        return weights_by_name(self._names, self._roles, weights)


def weights_by_name(names: Sequence[str], roles: Roles, weights: Array) -> dict[str, float]:
    """Domain -> its weight, 0 for those that are not trained on, from those of the others."""
    given = dict(zip(roles.train, weights.tolist(), strict=True))
    return {name: given.get(position, 0.0) for position, name in enumerate(names)}


def found_with(names: Sequence[str], recipe: DogeRecipe, roles: Roles) -> dict[str, Any]:
    """What a state depends on beside the run, as JSON values."""
    return {
        "rule": dataclasses.asdict(recipe),
        "trained_on": [names[position] for position in roles.train],
        "target_domains": [names[position] for position in roles.target],
    }


def require_found_with(
    state: dict[str, Any], names: Sequence[str], recipe: DogeRecipe, roles: Roles, way_out: WayOut
) -> None:
    """Raises UserError if ``state`` was found with another rule or other roles."""
    wanted = found_with(names, recipe, roles)
    require_same_rule(state["rule"], wanted["rule"], way_out)
    for name, what in (("target_domains", "another target"), ("trained_on", "other domains")):
        if state[name] != wanted[name]:
            raise UserError(
                f"the proxy was trained with {what}: {', '.join(state[name])}, not "
                f"{', '.join(wanted[name])}; {way_out}"
            )


def standing_of(
    state: dict[str, Any], num_domains: int, roles: Roles, way_out: WayOut
) -> DogeState:
    """The weights of what :meth:`GradientAlignment.state_dict` gave.

    Raises:
        UserError: if they are not those of so many domains.
    """
    first = DogeState.first(num_domains, roles)
    shapes = {k: v.shape for k, v in vars(first).items() if isinstance(v, np.ndarray)}
    arrays = state_arrays(state, shapes, way_out)
    return DogeState(**arrays, counted=state["counted"], moved=state["moved"])
