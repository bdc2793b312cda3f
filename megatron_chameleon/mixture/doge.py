"""DoGE: update domain weights from inner products of the domains' gradients.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1 and the authors' code. Norms, clipping
and alignment all follow from the inner products of the gradients, so the gradients themselves are
not needed. A mix of held-out text, the target of the authors' code for universal generalization, is
one more domain that is not trained on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.exponentiated import WeightState, exponentiated_step

# Added to the mean gradient norm before division, as in the authors' code, to avoid dividing by 0.
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class DogeRule:
    """Parameters of the update rule, all finite; ``DogeRuleOptions`` checks their ranges.

    Attributes:
        mu: weight of the Bregman divergence from the previous weights, above 0.
        eps: share of the uniform distribution mixed into the weights after each step, in [0, 1).
        dw_min: lower clipping bound of an alignment.
        dw_max: upper clipping bound.
        max_norm: maximum norm of each domain's gradient; 0 disables clipping.

    Raises:
        ValueError: if 1 / mu overflows, or ``dw_min`` is not below ``dw_max``.
    """

    mu: float = 0.01
    eps: float = 0.0
    dw_min: float = 0.0
    dw_max: float = 5.0
    max_norm: float = 5.0

    def __post_init__(self) -> None:
        if not math.isfinite(1.0 / self.mu):
            raise ValueError(f"mu is {self.mu!r}: 1 / mu overflows; use a larger mu, such as 0.01")
        if not self.dw_min < self.dw_max:
            raise ValueError(f"dw_min is {self.dw_min!r}: must be below dw_max, {self.dw_max:g}")


@dataclasses.dataclass(frozen=True)
class Roles:
    """Positions of the training domains (those with weights) and of the target domains.

    Attributes:
        train: positions of the training domains.
        target: positions of the target domains.
        target_factors: factor of the gradient of each target domain in the gradient of the target;
            empty if all are 1.
    """

    train: tuple[int, ...]
    target: tuple[int, ...]
    target_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class DogeState(WeightState):
    """Weights, inner products of gradients and alignments after a number of steps.

    Attributes:
        products: [k, k] float64, inner products of the domains' clipped gradients, each from the
            last step that sampled both domains; 0 before the first such step.
        alignment: [k] float64, the last <g_i, sum_{j in target} g_j> / (mean norm + 1e-6).
        mean_alignment: [k] float64, the mean of the alignment over steps.
    """

    products: Array
    alignment: Array
    mean_alignment: Array

    @classmethod
    def first(cls, num_domains: int, roles: Roles) -> DogeState:
        """Return the initial state: uniform weights, inner products and alignments of 0."""
        uniform = np.full(len(roles.train), 1.0 / len(roles.train))
        zeros = np.zeros(num_domains)
        return cls(np.log(uniform), uniform, 0, 0.0, np.outer(zeros, zeros), zeros, zeros)

    def after(
        self,
        products: Array,
        present: Sequence[int],
        learning_rate: float,
        rule: DogeRule,
        roles: Roles,
    ) -> DogeState:
        """Return the state after a step, alpha <- (1 - eps) softmax(ln alpha + s / mu) + eps / k.

        Here s is the learning rate times the clipped alignment.

        Args:
            products: [k, k] inner products of the domains' gradients on a batch, before clipping.
            present: domains in the batch; products of absent domains are ignored.
            learning_rate: learning rate of the model in this step.
            rule: hyperparameters of the update rule.
            roles: which domains are trained on, and which are the target.

        Raises:
            ValueError: if a product is not finite.
        """
        if not np.isfinite(products).all():
            raise ValueError("products must be finite: skip the step")
        factors = clip_factors(products, rule.max_norm)
        known, pairs = self.products.copy(), np.ix_(present, present)
        known[pairs] = (products * factors[:, None] * factors)[pairs]
        alignment = alignments(known, roles)
        limited = np.clip(alignment[list(roles.train)], rule.dw_min, rule.dw_max)
        gains = learning_rate * limited
        log_weights = exponentiated_step(self.log_weights, gains, 1.0 / rule.mu, rule.eps)
        mean = self.mean_alignment + (alignment - self.mean_alignment) / (self.counted + 1)
        return self.with_weights(
            log_weights, products=known, alignment=alignment, mean_alignment=mean
        )


def clip_factors(products: Array, max_norm: float) -> Array:
    """Compute the factors [k] that clip each gradient to the norm ``max_norm``.

    Args:
        products: [k, k] inner products of the gradients; only the diagonal is used.
        max_norm: 0 disables clipping.
    """
    norms = np.sqrt(np.diagonal(products))
    factors: Array = np.ones_like(norms)
    if max_norm > 0:
        np.divide(max_norm, norms, out=factors, where=norms > max_norm)
    return factors


def alignments(products: Array, roles: Roles) -> Array:
    """Compute alignments [k], <g_i, sum_{j in target} f_j g_j> / (mean norm + 1e-6) for domain i.

    The factors f_j are those of ``roles``. The mean norm is over the training domains that have
    been sampled.

    Args:
        products: [k, k] inner products.
        roles: which domains are trained on, and which are the target.
    """
    norms = np.sqrt(np.diagonal(products)[list(roles.train)])
    seen = norms[norms > 0]
    mean_norm = float(seen.mean()) if seen.size else 0.0
    of_target = products[:, list(roles.target)]
    if roles.target_factors:
        of_target = of_target * roles.target_factors
    return of_target.sum(axis=1) / (mean_norm + NORM_EPS)


def gradient_weights(
    state: DogeState, factors: Array, present: Sequence[int], roles: Roles
) -> Array:
    """Compute the weights [k] of the domains' gradients in the gradient of the step.

    A weight is alpha_i times the domain's clipping factor, where the alphas of the present domains
    are scaled to sum to 1. In the authors' code, they are not scaled, so that the gradient of a
    step with an absent domain is smaller.

    Args:
        state: state of the weights after the step's update of alpha.
        factors: [k] clipping factors.
        present: domains in the batch.
        roles: which domains are trained on, and which are the target.
    """
    weights = np.zeros(len(factors))
    rows = [row for row, domain in enumerate(roles.train) if domain in present]
    if rows:
        domains = [roles.train[row] for row in rows]
        logs = state.log_weights[rows]
        shares = np.exp(logs - logs.max())
        weights[domains] = shares / shares.sum() * factors[domains]
    return weights
