"""Adaptive Data Optimization (ADO): sample domains by how fast their scaling laws fall.

Jiang et al.: Adaptive Data Optimization: Dynamic Sample Selection with Scaling Laws, 2024
(arXiv 2410.11820). The policy is that of the authors' code (src/data_selectors/ado.py of
yidingjiang/ado, commit bc3d8d0, which corrects the preference of the first release), with these
exceptions: laws are fitted by weighted least squares instead of a Huber loss of logarithms, to
means over ranges of steps instead of smoothed losses of single steps; the policy is updated every
few steps instead of every step; and the credit averages the policies instead of the shares of
domains in the batches, which are their expectations.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_chameleon.mixture.checks import Array

# Exponents among which fits search. The authors' code bounds exponents to 0.05 and 0.8.
EXPONENTS = np.linspace(0.05, 0.8, 76)
CREDIT_RATE = 0.1
"""gamma_1, weight of the current policy in the credit, per step."""
CREDIT_EXPONENT = 0.5
"""s, exponent of the credit."""


@dataclasses.dataclass(frozen=True)
class ScalingLaws:
    """Laws L_k(n) = irreducible_k + scale_k n^-exponent_k of K domains, each array [K] float64.

    Losses are in nats, and n is the number of samples that the model has been trained on, of all
    domains, as in the authors' code: text of other domains helps, too.
    """

    irreducible: Array
    scale: Array
    exponent: Array

    def learning_speed(self, samples: float) -> Array:
        """Decrease of each domain's loss per sample, -dL_k/dn = exponent_k (L_k - e_k) / n: [K]."""
        reducible = self.scale * samples**-self.exponent
        speed: Array = self.exponent * reducible / samples
        return speed


def fit_scaling_laws(samples: Array, losses: Array, tokens: Array) -> ScalingLaws:
    """Fit a law to the losses of each domain, with a scale and an irreducible loss >= 0.

    Given the exponent, the law is linear, so its least squares have a closed form. They are
    evaluated for every exponent of ``EXPONENTS`` at once, and the exponent is refined by the
    parabola through the best three values. Residuals are relative to the loss, and weighted by the
    number of tokens. A domain whose loss does not fall gets scale 0.

    Args:
        samples: n, [T], increasing and positive.
        losses: mean loss of each domain at these points, [T, K]; ignored without tokens.
        tokens: number of tokens behind each loss, [T, K].
    """
    present = (tokens > 0) & (losses > 0)
    known = np.where(present, losses, 1.0)
    weights = np.where(present, tokens, 0.0) / known**2
    weights /= np.maximum(weights.sum(0), np.finfo(np.float64).tiny)
    last = samples[-1]
    powers = (samples / last)[:, None] ** -EXPONENTS  # [T, number of exponents]
    moments = (weights.T @ powers, weights.T @ powers**2, (weights * known).T @ powers)
    first = (weights * known).sum(0)[:, None]
    irreducible, scale = _least_squares(*moments, first)
    total, square, product = moments
    errors = (  # squared error up to a constant, [K, number of exponents]
        irreducible**2 + scale**2 * square + 2 * irreducible * scale * total
    ) - 2 * (irreducible * first + scale * product)
    best = errors.argmin(1)
    left, middle, right = (
        np.take_along_axis(errors, np.clip(best + shift, 0, len(EXPONENTS) - 1)[:, None], 1)[:, 0]
        for shift in (-1, 0, 1)
    )
    curvature = left - 2 * middle + right
    inside = (best > 0) & (best < len(EXPONENTS) - 1) & (curvature > 0)
    offset = np.where(inside, (left - right) / (2 * np.where(inside, curvature, 1.0)), 0.0)
    exponent = EXPONENTS[best] + offset.clip(-0.5, 0.5) * (EXPONENTS[1] - EXPONENTS[0])
    powers = (samples / last)[:, None] ** -exponent  # [T, K]
    irreducible, scale = _least_squares(
        (weights * powers).sum(0),
        (weights * powers**2).sum(0),
        (weights * known * powers).sum(0),
        first[:, 0],
    )
    return ScalingLaws(irreducible, scale * last**exponent, exponent)


def _least_squares(total: Array, square: Array, product: Array, mean: Array) -> tuple[Array, Array]:
    """Irreducible loss and scale >= 0 from weighted moments of x = n^-exponent and of losses y.

    Args:
        total: mean of x.
        square: mean of x^2.
        product: mean of x y.
        mean: mean of y.
    """
    variance = square - total**2
    varies = variance > 1e-12 * np.maximum(square, 1e-300)
    scale = np.where(varies, product - total * mean, 0.0) / np.where(varies, variance, 1.0)
    scale = np.maximum(scale, 0.0)
    irreducible = mean - scale * total
    below = irreducible < 0
    scale = np.where(below, product / np.where(below, square, 1.0), scale)
    return np.where(below, 0.0, irreducible), scale


def preference(prior: Array, credit: Array, speed: Array, smallest: float) -> Array:
    """Preference rho_k, proportional to mu_k h_k^s (-dL_k/dn), with a floor.

    As in the authors' code, the floor applies to rho. Floors that could take up more than half of
    the weight are lowered to 1 / (2 K) (assumed: the paper has K = 22). If no loss falls, the
    preference is the prior.

    Args:
        prior: mu, the mixture at the start, [K], summing to 1.
        credit: h, [K].
        speed: -dL_k/dn, [K], not negative.
        smallest: delta_min; the paper has 0.01.

    Returns:
        rho, [K], summing to 1.
    """
    preferred = prior * credit**CREDIT_EXPONENT * speed
    total = preferred.sum()
    preferred = preferred / total if total > 0 else prior
    preferred = np.maximum(preferred, min(smallest, 1 / (2 * len(prior))))
    result: Array = preferred / preferred.sum()
    return result


@dataclasses.dataclass(frozen=True)
class AdoState:
    """The policy of ADO after a number of steps, each array [K] float64, summing to 1.

    Attributes:
        policy: pi, the sampling probabilities.
        credit: h, moving average of the policy.
        average: mean of the preferences over the steps, pi-bar.
        step: t, the number of steps at the last update.
    """

    policy: Array
    credit: Array
    average: Array
    step: int

    @classmethod
    def first(cls, prior: Array) -> AdoState:
        """Return the state before the first step: all equal to the prior."""
        return cls(prior, prior, prior, 0)

    def credit_at(self, step: int) -> Array:
        """Credit h(t) = g pi(t) + (1 - g) h(t - 1) after the steps since the last update."""
        credit: Array = self.policy + (1 - CREDIT_RATE) ** (step - self.step) * (
            self.credit - self.policy
        )
        return credit

    def updated(self, step: int, preferred: Array, smoothing: float) -> AdoState:
        """Update the policy at ``step``.

        The policy is pi(t) = (1 - g2) average(t - 1) + g2 rho(t). The average is that of the
        preference of every step, average(t) = t / (t + 1) average(t - 1) + 1 / (t + 1) rho(t), with
        this preference for all steps since the last update.

        Args:
            step: t, number of steps done.
            preferred: rho(t), [K].
            smoothing: 1 - g2, weight of the past; the paper has 0.9.
        """
        policy = smoothing * self.average + (1 - smoothing) * preferred
        part = (step - self.step) / (step + 1)
        average = (1 - part) * self.average + part * preferred
        return AdoState(policy / policy.sum(), self.credit_at(step), average, step)
