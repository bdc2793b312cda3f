"""The settings that turn domain embeddings into Chameleon weights, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_chameleon.mixture.checks import Mode, check_mode, check_positive
from megatron_chameleon.mixture.weights import SCORE_FLOOR, check_score_limits


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything between the domain embeddings and the weights.

    How the embeddings were made (layer, windows, sampling) is not part of a recipe.

    Raises:
        ValueError: a ridge or temperature not above 0, limits out of range, or a relative
            temperature without normalised scores.
    """

    name: str
    """What the recipe is called in artifacts and messages."""

    center: bool
    """Subtract the mean over domains from the embeddings."""

    normalize: bool
    """Divide the scores by their sum."""

    ridge: float
    """lambda of K (K + k * lambda * I)^-1; a share of K's mean eigenvalue if relative."""

    ridge_relative: bool
    """Multiply ``ridge`` by trace(K) / k, which makes the scores independent of K's scale."""

    temperature_pretrain: float
    """tau of softmax(1 / (S * tau)); acts on 1 / (k * S) if relative."""

    temperature_finetune: float
    """tau of softmax(S / tau); acts on k * S if relative."""

    temperature_relative: bool
    """Measure scores against their mean 1 / k, so that a temperature means the same at any k."""

    score_floor: float = SCORE_FLOOR
    """Lowest score let through, as a share of the mean score (pretraining only)."""

    score_ceiling: float = math.inf
    """Highest score let through, as a multiple of the mean score."""

    def __post_init__(self) -> None:
        for field in ("ridge", "temperature_pretrain", "temperature_finetune"):
            check_positive(getattr(self, field), field)
        check_score_limits(self.score_floor, self.score_ceiling)
        if self.temperature_relative and not self.normalize:
            raise ValueError(
                "temperature_relative measures scores against their mean, so it needs "
                "normalize: set normalize to true or temperature_relative to false"
            )

    def effective_ridge(self, mean_eigenvalue: float) -> float:
        """Ridge in the units of K, whose trace(K) / k is given; where K is 0 any will do."""
        if not self.ridge_relative:
            return self.ridge
        return self.ridge * mean_eigenvalue or self.ridge

    def effective_temperature(self, mode: Mode, num_domains: int) -> float:
        """Temperature as ``domain_weights`` takes it, on 1 / S or S.

        With S normalised, 1 / (k S) / tau = 1 / S / (k tau) and k S / tau = S / (tau / k).
        """
        check_mode(mode)
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
"""The formulas of the paper's text, with the ridge of its experiments.

The paper gives its temperatures as ranges, [5, 10] and [0.2, 0.5]. The lower ends are taken, as in
the authors' code, so that this recipe and ``REFERENCE`` differ by centring and normalisation only.
The scores depend on the scale of the embeddings: where K is far above k * ridge they all near 1 and
the weights are near uniform; where it is far below, one domain takes everything.
"""

REFERENCE = dataclasses.replace(PAPER, name="reference", center=True, normalize=True)
"""What the authors' published code computes: centred embeddings and normalised scores. The default.

Only with normalised scores do weights fall in the range of the paper's tables.
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
"""For many domains, or embeddings of unknown scale: nothing depends on k or on the units.

A normalised 1 / S grows with k, so the fixed temperatures of ``REFERENCE`` give one-hot weights
from about a hundred domains on. Here z = 1 / (k S) for pretraining and k S for fine-tuning, with
the temperatures that equal the reference's at k = 7, the number of domains of most of the paper's
experiments. Scores are held within 0.2 and 5 times their mean, so that no domain outweighs an
average one by more than exp(4 * 7 / 5) = 270 times, however many there are. The scores that the
paper's tables imply at the reference's temperatures are 0.4 to 1.9 times their mean.
"""

DEFAULT_RECIPE = REFERENCE.name

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (PAPER, REFERENCE, SCALED)}
)


def resolve_recipe(recipe: str | Recipe = DEFAULT_RECIPE, **overrides: Any) -> Recipe:
    """Look a recipe up by name and change single knobs of it.

    Args:
        recipe: a name in ``RECIPES``, or a recipe.
        overrides: fields of ``Recipe`` to replace; None keeps the recipe's own value.

    Raises:
        ValueError: unknown recipe, unknown knob, or a value that ``Recipe`` refuses.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}: choose one of {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    knobs = [field.name for field in dataclasses.fields(Recipe) if field.name != "name"]
    unknown = sorted(set(overrides) - set(knobs))
    if unknown:
        raise ValueError(
            f"a recipe has no knob {', '.join(map(repr, unknown))}: choose among {', '.join(knobs)}"
        )
    changes = {knob: value for knob, value in overrides.items() if value is not None}
    return dataclasses.replace(recipe, **changes)
