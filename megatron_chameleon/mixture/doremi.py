"""DoReMi's update of domain weights from excess losses.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. Weights are kept as logarithms, so that none of them
overflows, and none falls to a zero from which it could not come back.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias, get_args

import numpy as np

from megatron_chameleon.mixture.checks import Array, check_positive
from megatron_chameleon.mixture.exponentiated import exponentiated_step, total_variation

Variant: TypeAlias = Literal["original", "fork"]


@dataclasses.dataclass(frozen=True)
class DoremiRecipe:
    """How excess losses become weights.

    Attributes:
        eta: step size of the exponentiated gradient ascent, above 0.
        eps: share of the weights that is uniform after each step, in [0, 1).
        floor: the least that an excess loss counts, in nats.
        ceiling: the most; None for no limit.
        clip_tokens: these limits are of each token's excess, and not of a domain's mean.
        count_first: the weights before the first step count in the running mean.
    """

    eta: float = 1.0
    eps: float = 1e-3
    floor: float = 0.0
    ceiling: float | None = None
    clip_tokens: bool = True
    count_first: bool = True

    def __post_init__(self) -> None:
        check_positive(self.eta, "eta")
        if not 0.0 <= self.eps < 1.0:
            raise ValueError(f"eps is {self.eps!r}: it lies from 0 on and below 1")
        if not math.isfinite(self.floor):
            raise ValueError(f"floor is {self.floor!r}: it must be a finite number")
        if self.ceiling is not None and not self.floor < self.ceiling < math.inf:
            raise ValueError(
                f"ceiling is {self.ceiling!r}: it must be a finite number above the floor, "
                f"{self.floor:g}"
            )


RECIPES: dict[Variant, DoremiRecipe] = {
    "original": DoremiRecipe(),
    "fork": DoremiRecipe(eta=0.1, eps=0.0, clip_tokens=False, count_first=False),
}
"""The authors' code, as its launch script sets it; and the fork that Chameleon's baseline stood on,
which clips domain means and takes small steps without smoothing."""
assert tuple(RECIPES) == get_args(Variant)


@dataclasses.dataclass(frozen=True)
class DoremiState:
    """Where the weights stand after some steps.

    Attributes:
        log_weights: ln alpha, [k] float64, as :func:`exponentiated_step` gives it.
        excess: lambda, [k] float64: the excess loss per token of each domain, in nats, when it was
            last in a batch.
        mean: [k] float64, the mean of the weights over steps.
        counted: how many weights are in it.
        moved: sum over steps of the total-variation distance that the weights moved.
    """

    log_weights: Array
    excess: Array
    mean: Array
    counted: int
    moved: float = 0.0

    @classmethod
    def first(cls, num_domains: int, vocab_size: int, recipe: DoremiRecipe) -> DoremiState:
        """Before the first step: uniform weights, and the loss of a guess, ln V, as the excess."""
        uniform = np.full(num_domains, 1.0 / num_domains)
        excess = np.full(num_domains, math.log(vocab_size))
        return cls(np.log(uniform), excess, uniform, counted=int(recipe.count_first))

    @property
    def weights(self) -> Array:
        """alpha, [k] float64, summing to 1."""
        weights: Array = np.exp(self.log_weights)
        return weights / weights.sum()

    def after(self, excess_sums: Array, tokens: Array, recipe: DoremiRecipe) -> DoremiState:
        """The state after a step.

        Args:
            excess_sums: [k] sums over a global batch's tokens of loss less the reference's loss,
                in nats; of what :class:`DoremiRecipe` leaves of it, where that clips tokens.
            tokens: [k] how many tokens those are; 0 for a domain that is absent.
            recipe: how they become weights.
        """
        excess = mean_excess(excess_sums, tokens, self.excess, recipe)
        log_weights = exponentiated_step(self.log_weights, excess, recipe.eta, recipe.eps)
        before, counted = self.weights, self.counted + 1
        after = DoremiState(log_weights, excess, self.mean, counted).weights
        return DoremiState(
            log_weights=log_weights,
            excess=excess,
            mean=self.mean + (after - self.mean) / counted,
            counted=counted,
            moved=self.moved + total_variation(before, after),
        )


def mean_excess(excess_sums: Array, tokens: Array, last: Array, recipe: DoremiRecipe) -> Array:
    """lambda, [k]: the mean excess loss of each domain's tokens; ``last`` where it is absent.

    Raises:
        ValueError: if a sum is not finite.
    """
    if not np.isfinite(excess_sums).all():
        bad = int(np.argmin(np.isfinite(excess_sums)))
        raise ValueError(
            f"the excess loss of position {bad} is {excess_sums[bad]}: pass sums of finite losses"
        )
    means = excess_sums / np.maximum(tokens, 1.0)
    if not recipe.clip_tokens:
        means = np.clip(means, recipe.floor, recipe.ceiling)
    excess: Array = np.where(tokens > 0, means, last)
    return excess


def token_weights(log_weights: Array, sampling: Array, tokens: Array) -> Array:
    """What a token's loss counts so that the mean over a batch is sum(w l) / sum(w).

    w_i is proportional to alpha_i over the rate at which the domain is sampled, and scaled so that
    the sum over all tokens is the number of tokens, by which the loss is divided afterwards.

    Args:
        log_weights: ln alpha, [k] float64.
        sampling: [k] the rates; above 0 where there are tokens.
        tokens: [k] tokens of each domain in the global batch.

    Returns:
        [k] float64; 0 for domains without a token.
    """
    weights = np.zeros_like(log_weights)
    there = tokens > 0
    if there.any():
        logits = log_weights[there] - np.log(sampling[there])
        # Shifted by the largest that is there: were all weights here as good as 0, the batch is
        # still divided among its domains by their ratios.
        weights[there] = np.exp(logits - logits.max())
        weights *= tokens.sum() / (weights @ tokens)
    return weights
