"""DoGE's training hook: weigh the domains' gradients by their alignment with the target's.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.methods.proxy import load_state, save_state
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


class GradientAlignment(TrainingHook):
    """Weighs the gradient of each domain by its alignment with the target's.

    Samples always follow the run's mixture; only the weights of their gradients change.

    Args:
        names: of the corpus's domains (k).
        recipe: of the update rule.
        roles: of the domains.
    """

    combines_gradients = True

    def __init__(self, names: Sequence[str], recipe: DogeRecipe, roles: Roles) -> None:
        super().__init__()
        self._names, self._recipe, self._roles = list(names), recipe, roles
        self.state = DogeState.first(len(names), roles)
        # What a state depends on besides the options of the run, as JSON values.
        self.settings: dict[str, Any] = {
            "rule": dataclasses.asdict(recipe),
            "trained_on": [names[position] for position in roles.train],
            "target_domains": [names[position] for position in roles.target],
        }

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Update the weights by the gradients' inner products, and weigh the gradients by them.

        Products that are not finite are ignored: the guard skips the step if they are of a domain
        that is trained on.
        """
        products = gradients.dot_products().cpu().numpy()
        present, factors = gradients.present, np.ones(len(self._names))
        if np.isfinite(products).all():
            factors = clip_factors(products, self._recipe.max_norm)
            self.state = self.state.after(
                products, present, gradients.learning_rate, self._recipe, self._roles
            )
        return torch.from_numpy(gradient_weights(self.state, factors, present, self._roles))

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and each domain's alignment."""
        return {
            "weights": self._by_name(self.state.weights),
            "mean_weights": self._by_name(self.state.mean),
            "alignment": dict(zip(self._names, self.state.alignment.tolist(), strict=True)),
            "moved": self.state.moved,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the weights, and the rule and roles that produced it."""
        return save_state(self.state, self.settings)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``.

        Raises:
            UserError: if it is of another rule, target or number of domains, or damaged.
        """
        self.state = load_state(state, self.state, self.settings)

    def _by_name(self, weights: Array) -> dict[str, float]:
        """Domain -> weight, 0 for domains that are not trained on."""
        trained = dict(zip(self._roles.train, weights.tolist(), strict=True))
        return {name: trained.get(position, 0.0) for position, name in enumerate(self._names)}
