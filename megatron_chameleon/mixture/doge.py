"""DoGE's update of domain weights from inner products of the domains' gradients.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1 and the authors' code. The gradients
themselves never come here: norms, clipping and alignment all follow from their inner products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatron_chameleon.mixture.checks import Array, check_positive
from megatron_chameleon.mixture.exponentiated import exponentiated_step, total_variation

# Added to the mean norm, as in the authors' code.
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class DogeRecipe:
    """How inner products become weights.

    Attributes:
        mu: strength of the Bregman divergence that holds the weights back, above 0.
        eps: share of the weights that is uniform after each step, in [0, 1).
        dw_min: the least that an alignment counts.
        dw_max: the most.
        max_norm: each domain's gradient is clipped to it; 0 clips nothing.
    """

    mu: float = 0.01
    eps: float = 0.0
    dw_min: float = 0.0
    dw_max: float = 5.0
    max_norm: float = 5.0

    def __post_init__(self) -> None:
        check_positive(self.mu, "mu")
        if not math.isfinite(1.0 / self.mu):
            raise ValueError(
                f"mu is {self.mu!r}: 1 / mu overflows; give a larger one, such as 0.01"
            )
        if not 0.0 <= self.eps < 1.0:
            raise ValueError(f"eps is {self.eps!r}: it lies from 0 on and below 1")
        if not (math.isfinite(self.dw_min) and math.isfinite(self.dw_max)):
            raise ValueError(f"dw_min {self.dw_min!r}, dw_max {self.dw_max!r}: give finite numbers")
        if not self.dw_min < self.dw_max:
            raise ValueError(f"dw_min is {self.dw_min!r}: it lies below dw_max, {self.dw_max:g}")
        if not 0.0 <= self.max_norm < math.inf:
            raise ValueError(f"max_norm is {self.max_norm!r}: it is a finite number from 0 on")


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which of the k domains are trained on, and so get a weight, and which are the target."""

    train: tuple[int, ...]
    target: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DogeState:
    """Where the weights stand after some steps.

    Attributes:
        log_weights: ln alpha of the domains that are trained on, float64.
        products: [k, k] float64, inner products of the clipped gradients of all domains, each as of
            the last step that had both of the pair; 0 before the first.
        alignment: [k] float64, the last <g_i, sum_{j in target} g_j> / (mean norm + 1e-6).
        mean: the mean of alpha over steps.
        mean_alignment: [k] float64, that of the alignment.
        counted: how many steps are in the means.
        moved: sum over steps of the total-variation distance that alpha moved.
    """

    log_weights: Array
    products: Array
    alignment: Array
    mean: Array
    mean_alignment: Array
    counted: int = 0
    moved: float = 0.0

    @classmethod
    def first(cls, num_domains: int, roles: Roles) -> DogeState:
        """Before the first step: uniform weights, and gradients that are not known."""
        uniform = np.full(len(roles.train), 1.0 / len(roles.train))
        zeros = np.zeros(num_domains)
        return cls(np.log(uniform), np.zeros((num_domains, num_domains)), zeros, uniform, zeros)

    @property
    def weights(self) -> Array:
        """The alpha of the domains that are trained on, float64, summing to 1."""
        weights: Array = np.exp(self.log_weights)
        return weights / weights.sum()

    def after(
        self,
        products: Array,
        present: Sequence[int],
        learning_rate: float,
        recipe: DogeRecipe,
        roles: Roles,
    ) -> DogeState:
        """The state after a step: alpha <- (1 - eps) softmax(ln alpha + s / mu) + eps / k.

        s is the learning rate times the alignment, between its limits.

        Args:
            products: [k, k] inner products of the domains' gradients over a batch, not clipped.
            present: the domains that the batch has; the products of the others do not count.
            learning_rate: of the step's update of the model.
            recipe: how they become weights.
            roles: of the domains.

        Raises:
            ValueError: if a product is not finite.
        """
        known = self._products_known(products, present, recipe.max_norm)
        alignment = alignments(known, roles)
        limited = np.clip(alignment[list(roles.train)], recipe.dw_min, recipe.dw_max)
        gains = learning_rate * limited
        log_weights = exponentiated_step(self.log_weights, gains, 1.0 / recipe.mu, recipe.eps)
        return self._moved_to(log_weights, known, alignment)

    def _products_known(self, products: Array, present: Sequence[int], max_norm: float) -> Array:
        """[k, k] of the clipped gradients, those of before where the batch lacks a domain."""
        if not np.isfinite(products).all():
            raise ValueError("products hold NaN or infinity: leave out the step that they are of")
        factors = clip_factors(products, max_norm)
        return merged_products(self.products, products * factors[:, None] * factors, present)

    def _moved_to(self, log_weights: Array, products: Array, alignment: Array) -> DogeState:
        """One more step in the means, at new weights."""
        new = dataclasses.replace(
            self, log_weights=log_weights, products=products, alignment=alignment
        )
        counted = self.counted + 1
        return dataclasses.replace(
            new,
            mean=self.mean + (new.weights - self.mean) / counted,
            mean_alignment=self.mean_alignment + (alignment - self.mean_alignment) / counted,
            counted=counted,
            moved=self.moved + total_variation(self.weights, new.weights),
        )


def clip_factors(products: Array, max_norm: float) -> Array:
    """What each gradient is multiplied by so that its norm is at most ``max_norm``, [k].

    Args:
        products: [k, k] inner products of the gradients, of which the diagonal is read.
        max_norm: 0 clips nothing.
    """
    norms = np.sqrt(np.diagonal(products))
    factors: Array = np.ones_like(norms)
    if max_norm > 0:
        np.divide(max_norm, norms, out=factors, where=norms > max_norm)
    return factors


def merged_products(last: Array, new: Array, present: Sequence[int]) -> Array:
    """``new`` [k, k] for the pairs of which both are present, ``last`` for the others."""
    known = last.copy()
    pairs = np.ix_(present, present)
    known[pairs] = new[pairs]
    return known


def alignments(products: Array, roles: Roles) -> Array:
    """<g_i, sum_{j in target} g_j> / (mean norm + 1e-6) of every domain i, [k].

    The mean is over the norms of the domains that are trained on, without those that no batch has
    had yet.

    Args:
        products: [k, k] inner products.
        roles: of the domains.
    """
    norms = np.sqrt(np.diagonal(products)[list(roles.train)])
    seen = norms[norms > 0]
    mean_norm = float(seen.mean()) if seen.size else 0.0
    aligned: Array = products[:, list(roles.target)].sum(axis=1) / (mean_norm + NORM_EPS)
    return aligned


def gradient_weights(
    state: DogeState, factors: Array, present: Sequence[int], roles: Roles
) -> Array:
    """What each domain's gradient counts in the one that is trained by, [k].

    alpha_i times its clipping factor. Where a batch lacks a domain, those of the others are scaled
    so that the alphas of the batch sum to 1; the authors' code counts the last gradient of the
    absent one instead, for which it holds a copy of the model's size.

    Args:
        state: with the new alpha.
        factors: [k] by which the gradients are clipped.
        present: the domains that the batch has.
        roles: of the domains.
    """
    weights = np.zeros(len(factors))
    there = [(row, domain) for row, domain in enumerate(roles.train) if domain in set(present)]
    if not there:
        return weights
    rows, domains = map(list, zip(*there, strict=True))
    logs = state.log_weights[rows]
    shares = np.exp(logs - logs.max())
    weights[domains] = shares / shares.sum() * factors[domains]
    return weights
