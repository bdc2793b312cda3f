"""Chameleon: compute weights from domain embeddings, with the settings of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.affinity import center_embeddings, gram_matrix, squared_norms
from megatron_chameleon.mixture.checks import Array, Mode, as_matrix, check_positive
from megatron_chameleon.mixture.leverage import feature_ridge_leverage, leverage_scores
from megatron_chameleon.mixture.target import scaled_prior
from megatron_chameleon.mixture.weights import (
    SCORE_FLOOR,
    check_score_limits,
    clip_scores,
    domain_weights,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the computation of weights from domain embeddings.

    How the embeddings were made (layer, windows, sampling) is not part of a recipe.

    Raises:
        ValueError: if a ridge or temperature is not above 0, a limit is out of range, or a relative
            temperature is combined with scores that are not normalised.
    """

    name: str
    """Name of the recipe in artifacts and messages."""

    center: bool
    """Subtract the mean over domains from the embeddings."""

    normalize: bool
    """Divide the scores by their sum."""

    ridge: float
    """Ridge lambda in K (K + k * lambda * I)^-1; a fraction of K's mean eigenvalue if
    ``ridge_relative``."""

    ridge_relative: bool
    """Multiply ``ridge`` by trace(K) / k, which makes the scores independent of K's scale."""

    temperature_pretrain: float
    """Temperature tau in softmax(1 / (S * tau)); applies to 1 / (k * S) if
    ``temperature_relative``."""

    temperature_finetune: float
    """Temperature tau in softmax(S / tau); applies to k * S if ``temperature_relative``."""

    temperature_relative: bool
    """Apply temperatures to scores relative to their mean, 1 / k, so that suitable temperatures do
    not depend on k."""

    score_floor: float = SCORE_FLOOR
    """Lower clipping limit of scores, as a fraction of the mean score (pretraining only)."""

    score_ceiling: float = math.inf
    """Upper clipping limit of scores, as a multiple of the mean score."""

    def __post_init__(self) -> None:
        for field in ("ridge", "temperature_pretrain", "temperature_finetune"):
            check_positive(getattr(self, field), field)
        check_score_limits(self.score_floor, self.score_ceiling)
        if self.temperature_relative and not self.normalize:
            raise ValueError(
                "temperature_relative requires normalized scores: set normalize to true, or "
                "temperature_relative to false"
            )

    def effective_ridge(self, mean_eigenvalue: float) -> float:
        """Ridge in the units of K, given K's mean eigenvalue trace(K) / k."""
        if not self.ridge_relative:
            return self.ridge
        return self.ridge * mean_eigenvalue or self.ridge

    def effective_temperature(self, mode: Mode, num_domains: int) -> float:
        """Temperature tau of ``domain_weights``, for 1 / S (pretraining) or S (fine-tuning).

        With S normalised, 1 / (k S) / tau = 1 / S / (k tau) and k S / tau = S / (tau / k).
        """
        pretrain = mode == "pretrain"
        temperature = self.temperature_pretrain if pretrain else self.temperature_finetune
        if not self.temperature_relative:
            return temperature
        return temperature * num_domains if pretrain else temperature / num_domains


PAPER = Recipe(
    name="paper",
    center=False,
    normalize=False,
    ridge=10.0,
    ridge_relative=False,
    temperature_pretrain=5.0,
    temperature_finetune=0.2,
    temperature_relative=False,
)
"""Recipe with the formulas of the paper's text and the ridge of its experiments.

The paper gives its temperatures as ranges, [5, 10] and [0.2, 0.5]. This recipe uses the lower ends
of the ranges, as the authors' code does. It differs from ``REFERENCE`` only in centring and
normalisation. The scores depend on the scale of the embeddings. If K is far above k * ridge, all
scores are near 1 and the weights are near uniform; if K is far below, one domain gets all of the
weight.
"""

REFERENCE = dataclasses.replace(PAPER, name="reference", center=True, normalize=True)
"""Recipe of the authors' published code, the default: centred embeddings, normalised scores.

Weights fall in the range of the paper's tables only if scores are normalised.
"""

SCALED = Recipe(
    name="scaled",
    center=True,
    normalize=True,
    ridge=0.1,
    ridge_relative=True,
    temperature_pretrain=5.0 / 7.0,
    temperature_finetune=0.2 * 7.0,
    temperature_relative=True,
    score_floor=0.2,
    score_ceiling=5.0,
)
"""Recipe for many domains or embeddings of unknown scale: no setting depends on k or on units.

A normalised 1 / S grows with k, so the fixed temperatures of ``REFERENCE`` give one-hot weights
from about a hundred domains on. Here z = 1 / (k S) for pretraining and k S for fine-tuning, with
the temperatures that equal the reference's at k = 7, the number of domains of most of the paper's
experiments. Scores are clipped to 0.2 to 5 times their mean, so that no domain outweighs an
average one by more than exp(4 * 7 / 5) = 270 times, for any number of domains. At the reference's
temperatures, the paper's tables imply scores of 0.4 to 1.9 times their mean.
"""

DEFAULT_RECIPE = REFERENCE.name

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (PAPER, REFERENCE, SCALED)}
)


def resolve_recipe(recipe: str | Recipe = DEFAULT_RECIPE, **overrides: Any) -> Recipe:
    """Look up a recipe by name and override single fields of it.

    Args:
        recipe: a name in ``RECIPES``, or a recipe.
        overrides: fields of ``Recipe`` to replace; None keeps the recipe's own value.

    Raises:
        ValueError: if the recipe is unknown, or ``Recipe`` rejects a value.
        TypeError: if a field is unknown.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}: choose one of {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    changes = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(recipe, **changes)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightResult:
    """Chameleon weights, with the scores, ridge and temperature from which they were computed."""

    weights: Array
    """Domain weights [k] float64, summing to 1."""

    scores: Array
    """Leverage scores [k] float64 in [0, 1), before normalisation and clipping."""

    features: Array
    """Domain embeddings [k, h] float64, centred if the recipe centres them."""

    effective_ridge: float
    """Ridge lambda in the units of the affinity."""

    effective_temperature: float
    """Temperature tau that was applied to 1 / S (pretraining) or S (fine-tuning)."""

    degenerate: tuple[int, ...]
    """Positions of the domains whose score was clipped."""

    mode: Mode
    """"pretrain" or "finetune"."""

    recipe: Recipe
    """The recipe after overrides."""

    prior: Array | None
    """Prior [k] float64 with mean 1; None if uniform."""

    @functools.cached_property
    def affinity(self) -> Array:
        """The affinity K = X X^T of ``features``, [k, k] float64, computed on first use."""
        return gram_matrix(self.features)

    @property
    def effective_dimension(self) -> float:
        """Sum of the scores: the number of independent directions that matter at this ridge."""
        return float(self.scores.sum())


def chameleon_weights(
    embeddings: npt.ArrayLike,
    mode: Mode,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    prior: npt.ArrayLike | None = None,
    **overrides: Any,
) -> WeightResult:
    """Compute domain weights from domain embeddings (Chameleon, Algorithm 1, from step 3 on).

    Time grows as k^3, or as k h^2 if there are more domains than features.

    Args:
        embeddings: [k, h], one row per domain, any real dtype; float64 inside.
        mode: "pretrain" (inverse scores) or "finetune" (scores).
        recipe: a name in ``RECIPES`` or a ``Recipe``.
        prior: eta, [k], > 0, on any scale: importance of each domain (see
            ``megatron_chameleon.mixture.target``). The prior changes neither centring nor ridge,
            and a uniform prior gives the same weights as None.
        overrides: fields of the recipe to replace; None keeps the recipe's value.

    Returns:
        The weights with scores, affinity and the ridge and temperature that were applied.

    Raises:
        ValueError: see ``affinity_matrix``, ``leverage_scores``, ``domain_weights``,
            ``scaled_prior`` and ``resolve_recipe``.

    Warns:
        DegenerateScoreWarning: a score was clipped (see ``domain_weights``).
    """
    settings = resolve_recipe(recipe, **overrides)
    features = center_embeddings(embeddings) if settings.center else as_matrix(embeddings)
    num_domains = len(features)
    ridge = settings.effective_ridge(float(squared_norms(features).sum()) / num_domains)
    eta = None if prior is None else scaled_prior(prior, num_domains)
    scaled = features if eta is None else np.sqrt(eta)[:, None] * features
    # Both forms give the same scores; use the one that factors the smaller matrix.
    if scaled.shape[1] < num_domains:
        scores = feature_ridge_leverage(scaled, ridge)
    else:
        scores = leverage_scores(gram_matrix(scaled), ridge)
    temperature = settings.effective_temperature(mode, num_domains)
    floor, ceiling = settings.score_floor, settings.score_ceiling
    weights = domain_weights(
        scores,
        mode,
        temperature,
        settings.normalize,
        prior=eta,
        score_floor=floor,
        score_ceiling=ceiling,
    )
    return WeightResult(
        weights=weights,
        scores=scores,
        features=features,
        effective_ridge=ridge,
        effective_temperature=temperature,
        degenerate=clip_scores(scores, mode, floor, ceiling, eta)[1],
        mode=mode,
        recipe=settings,
        prior=eta,
    )
