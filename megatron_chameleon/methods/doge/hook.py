"""DoGE's training hook: weigh the domains' gradients by their alignment with the target's.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.methods.proxy import MeanWeightsHook
from megatron_chameleon.mixture.doge import (
    DogeRecipe,
    DogeState,
    Roles,
    clip_factors,
    gradient_weights,
)
from megatron_chameleon.training.domain_gradients import DomainGradients


class GradientAlignment(MeanWeightsHook[DogeState]):
    """Weigh the gradient of each domain by its alignment with the gradient of the target.

    Samples always follow the run's mixture; only the weights of their gradients change.

    Args:
        names: the k domains of the corpus.
        recipe: parameters of the update rule.
        roles: which domains are trained on, and which are the target.
    """

    combines_gradients = True

    def __init__(self, names: Sequence[str], recipe: DogeRecipe, roles: Roles) -> None:
        settings = {
            "rule": dataclasses.asdict(recipe),
            "trained_on": [names[position] for position in roles.train],
            "target_domains": [names[position] for position in roles.target],
        }
        super().__init__(names, roles.train, DogeState.first(len(names), roles), settings)
        self._recipe, self._roles = recipe, roles

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Update the weights by the gradients' inner products, and weigh the gradients by them.

        Products that are not finite are ignored. If they belong to a training domain, the guard
        skips the step.
        """
        products = gradients.dot_products().cpu().numpy()
        present, factors = gradients.present, np.ones(len(self.names))
        if np.isfinite(products).all():
            factors = clip_factors(products, self._recipe.max_norm)
            self.state = self.state.after(
                products, present, gradients.learning_rate, self._recipe, self._roles
            )
        return torch.from_numpy(gradient_weights(self.state, factors, present, self._roles))

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and each domain's alignment."""
        alignment = dict(zip(self.names, self.state.alignment.tolist(), strict=True))
        return {**super().metrics(), "alignment": alignment}
