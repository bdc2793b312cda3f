"""Domain embeddings -> Chameleon weights, by a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from megatron_chameleon.mixture.affinity import center_embeddings, gram_matrix
from megatron_chameleon.mixture.checks import Array, Mode, as_embeddings, check_mode
from megatron_chameleon.mixture.leverage import feature_ridge_leverage, leverage_scores
from megatron_chameleon.mixture.recipes import DEFAULT_RECIPE, Recipe, resolve_recipe
from megatron_chameleon.mixture.weights import degenerate_positions, domain_weights


@dataclasses.dataclass(frozen=True, eq=False)
class WeightResult:
    """Weights and the steps that led to them."""

    weights: Array
    """[k] float64, summing to 1."""

    scores: Array
    """[k] float64 leverage scores in [0, 1), before normalisation and limits."""

    affinity: Array
    """[k, k] float64, centred if the recipe says so."""

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

    @property
    def effective_dimension(self) -> float:
        """Sum of the scores: how many independent directions the domains span at this ridge."""
        return float(self.scores.sum())


def chameleon_weights(
    embeddings: npt.ArrayLike,
    mode: Mode,
    recipe: str | Recipe = DEFAULT_RECIPE,
    **overrides: Any,
) -> WeightResult:
    """Domain weights from domain embeddings (Chameleon, Algorithm 1, from its third step on).

    Args:
        embeddings: [k, h], one row per domain, any real dtype; float64 inside.
        mode: "pretrain" (inverse scores) or "finetune" (scores).
        recipe: a name in ``RECIPES`` or a ``Recipe``.
        overrides: single knobs of the recipe, by field name; None keeps the recipe's value.

    Returns:
        The weights with scores, affinity and the ridge and temperature that were applied.

    Raises:
        ValueError: see ``affinity_matrix``, ``leverage_scores``, ``domain_weights`` and
            ``resolve_recipe``.

    Warns:
        DegenerateScoreWarning: a score was held at a limit (see ``domain_weights``).
    """
    settings = resolve_recipe(recipe, **overrides)
    check_mode(mode)
    features = center_embeddings(embeddings) if settings.center else as_embeddings(embeddings)
    affinity = gram_matrix(features)
    ridge = settings.effective_ridge(affinity)
    num_domains, num_features = features.shape
    # The two forms are equal; the smaller matrix is the one to factor.
    if num_features < num_domains:
        scores = feature_ridge_leverage(features, ridge)
    else:
        scores = leverage_scores(affinity, ridge)
    temperature = settings.effective_temperature(mode, num_domains)
    limits = (settings.score_floor, settings.score_ceiling)
    weights = domain_weights(
        scores,
        mode,
        temperature,
        settings.normalize,
        score_floor=settings.score_floor,
        score_ceiling=settings.score_ceiling,
    )
    return WeightResult(
        weights=weights,
        scores=scores,
        affinity=affinity,
        effective_ridge=ridge,
        effective_temperature=temperature,
        degenerate=degenerate_positions(scores, mode, *limits),
        mode=mode,
        recipe=settings,
    )


def chameleon_weight_fn(
    mode: Mode, recipe: str | Recipe = DEFAULT_RECIPE, **overrides: Any
) -> Callable[[Array], Array]:
    """The map from embeddings [k, h] to weights [k] alone, for ``bootstrap_weights``.

    The recipe is resolved, and its errors raised, here rather than at the first call.
    """
    settings = resolve_recipe(recipe, **overrides)
    check_mode(mode)

    def weigh(embeddings: Array) -> Array:
        return chameleon_weights(embeddings, mode, settings).weights

    return weigh
