"""Domain embeddings -> Chameleon weights, by a recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.affinity import center_embeddings, gram_matrix, squared_norms
from megatron_chameleon.mixture.checks import Array, Mode, as_embeddings, check_mode
from megatron_chameleon.mixture.leverage import feature_ridge_leverage, leverage_scores
from megatron_chameleon.mixture.recipes import DEFAULT_RECIPE, Recipe, resolve_recipe
from megatron_chameleon.mixture.target import scaled_prior
from megatron_chameleon.mixture.weights import degenerate_positions, domain_weights


@dataclasses.dataclass(frozen=True, eq=False)
class WeightResult:
    """Weights and the steps that led to them."""

    weights: Array
    """[k] float64, summing to 1."""

    scores: Array
    """[k] float64 leverage scores in [0, 1), before normalisation and limits."""

    features: Array
    """[k, h] float64 domain embeddings, centred if the recipe says so."""

    effective_ridge: float
    """lambda in the units of the affinity."""

    effective_temperature: float
    """tau as applied to 1 / S or S."""

    degenerate: tuple[int, ...]
    """Positions of the domains whose score was held at a limit."""

    mode: Mode
    """"pretrain" or "finetune"."""

    recipe: Recipe
    """The recipe after overrides."""

    prior: Array | None
    """[k] float64 of mean 1; None where all domains have the same."""

    @functools.cached_property
    def affinity(self) -> Array:
        """K = X X^T of ``features``, [k, k] float64, made when first asked for."""
        return gram_matrix(self.features)

    @property
    def effective_dimension(self) -> float:
        """Sum of the scores: how many independent directions the domains span at this ridge."""
        return float(self.scores.sum())


def chameleon_weights(
    embeddings: npt.ArrayLike,
    mode: Mode,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    prior: npt.ArrayLike | None = None,
    **overrides: Any,
) -> WeightResult:
    """Domain weights from domain embeddings (Chameleon, Algorithm 1, from its third step on).

    Costs k^3, or k h^2 where there are more domains than features.

    Args:
        embeddings: [k, h], one row per domain, any real dtype; float64 inside.
        mode: "pretrain" (inverse scores) or "finetune" (scores).
        recipe: a name in ``RECIPES`` or a ``Recipe``.
        prior: eta, [k], above 0, on any scale: how much the mixture is for each domain (see
            ``megatron_chameleon.mixture.target``). Centring and ridge are as without it, and equal
            priors give the very weights that none gives.
        overrides: single knobs of the recipe, by field name; None keeps the recipe's value.

    Returns:
        The weights with scores, affinity and the ridge and temperature that were applied.

    Raises:
        ValueError: see ``affinity_matrix``, ``leverage_scores``, ``domain_weights``,
            ``scaled_prior`` and ``resolve_recipe``.

    Warns:
        DegenerateScoreWarning: a score was held at a limit (see ``domain_weights``).
    """
    settings = resolve_recipe(recipe, **overrides)
    check_mode(mode)
    features = center_embeddings(embeddings) if settings.center else as_embeddings(embeddings)
    num_domains = len(features)
    ridge = settings.effective_ridge(float(squared_norms(features).sum()) / num_domains)
    eta = None if prior is None else scaled_prior(prior, num_domains)
    scores = _scores(features if eta is None else np.sqrt(eta)[:, None] * features, ridge)
    temperature = settings.effective_temperature(mode, num_domains)
    weights = domain_weights(
        scores,
        mode,
        temperature,
        settings.normalize,
        prior=eta,
        score_floor=settings.score_floor,
        score_ceiling=settings.score_ceiling,
    )
    limits = (settings.score_floor, settings.score_ceiling)
    return WeightResult(
        weights=weights,
        scores=scores,
        features=features,
        effective_ridge=ridge,
        effective_temperature=temperature,
        degenerate=degenerate_positions(scores, mode, *limits, eta),
        mode=mode,
        recipe=settings,
        prior=eta,
    )


def _scores(features: Array, ridge: float) -> Array:
    """Ridge leverage scores of [k, h]. The two forms are equal; the smaller matrix is factored."""
    num_domains, num_features = features.shape
    if num_features < num_domains:
        return feature_ridge_leverage(features, ridge)
    return leverage_scores(gram_matrix(features), ridge)


def chameleon_weight_fn(
    mode: Mode,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    prior: Callable[[Array], Array] | None = None,
    **overrides: Any,
) -> Callable[[Array], Array]:
    """The map from embeddings [k, h] to weights [k] alone, for ``bootstrap_weights``.

    ``prior`` maps embeddings to the prior [k], which may depend on them. The recipe is resolved,
    and its errors raised, here rather than at the first call.
    """
    settings = resolve_recipe(recipe, **overrides)
    check_mode(mode)

    def weigh(embeddings: Array) -> Array:
        eta = None if prior is None else prior(embeddings)
        return chameleon_weights(embeddings, mode, settings, prior=eta).weights

    return weigh
