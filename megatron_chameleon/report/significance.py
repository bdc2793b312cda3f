"""Statistics of compared models: differences, their standard errors, and which are significant."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from megatron_chameleon.artifacts import DomainLoss, EvaluationResult
from megatron_chameleon.artifacts.evaluation_result import (
    error_of_mean,
    error_of_sum,
    ratio_standard_error,
)

# Loss differences beyond this many standard errors are called significant.
SURE = 2.0
# Standard errors from the estimate to the ends of a 95% interval.
NORMAL_95 = 1.96
LEAST_RATIO = 2.0
"""Mixtures are called distinguishable if between_mixtures / between_seeds reaches this value."""

Array = NDArray[np.float64]


def paired_difference(ours: Array, theirs: Array) -> tuple[float, float, float]:
    """Return the mean of ``ours`` [s] minus ``theirs`` [s], paired by seed.

    Returns:
        The mean, its standard error, and half the width of its 95% interval by Student's t with
        s - 1 degrees of freedom.
    """
    gaps = ours - theirs
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    return float(gaps.mean()), error, float(stdtrit(len(gaps) - 1, 0.975)) * error


def holm(differences: Array, level: float = 0.05) -> tuple[Array, Array]:
    """Test m mean differences against 0, corrected for m tests by Holm's step-down method.

    Args:
        differences: [m, s] differences by seed; each mean is tested by Student's t with s - 1
            degrees of freedom.
        level: probability that any true null hypothesis is rejected.

    Returns:
        p-values [m], adjusted for m tests, and half widths [m] of intervals. The interval of the
        j-th smallest p-value has the level of its test, 1 - level / (m - j + 1). The first test
        that does not reject sets the level of its own and all later intervals. An interval then
        contains 0 exactly if its test does not reject. Source: Holm 1979, "A simple sequentially
        rejective multiple test procedure".
    """
    count, seeds = differences.shape
    errors = differences.std(axis=1, ddof=1) / math.sqrt(seeds)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistics = np.nan_to_num(differences.mean(axis=1) / errors, posinf=np.inf, neginf=-np.inf)
    p_values = 2 * stdtr(seeds - 1, -np.abs(statistics))
    adjusted, order = holm_adjusted(p_values), np.argsort(p_values, kind="stable")
    # The first test that does not reject, or the last one; later intervals have its level.
    last = min(int((adjusted <= level).sum()), count - 1)
    tests = np.empty(count)
    tests[order] = count - np.minimum(np.arange(count), last)
    return adjusted, stdtrit(seeds - 1, 1 - level / tests / 2) * errors


def holm_adjusted(p_values: Array) -> Array:
    """Adjust p-values [m] for m tests by Holm's step-down method."""
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(
        np.maximum.accumulate(p_values[order] * np.arange(count, 0, -1)), 1.0
    )
    return adjusted


def spread_of(averages: Array) -> dict[str, Any]:
    """Standard deviation of ``averages`` [m, s] between mixtures and between seeds; m, s >= 2.

    Returns:
        ``between_mixtures``: standard deviation, over mixtures, of their means over seeds.
        ``between_seeds``: pooled standard deviation within mixtures after removing the seed's
        effect: the root of the sum of squared residuals of y[m, s] = mixture m + seed s, divided by
        their (m - 1)(s - 1) degrees of freedom. ``ratio``: between_mixtures / between_seeds; the
        ratio is infinite if all residuals are 0, and about 1 / sqrt(s) if the mixture has no
        effect. ``are_distinguishable``: whether the ratio is ``LEAST_RATIO`` or more.
    """
    by_mixture = averages.mean(axis=1, keepdims=True)
    residuals = averages - by_mixture - averages.mean(axis=0, keepdims=True) + averages.mean()
    freedom = (averages.shape[0] - 1) * (averages.shape[1] - 1)
    mixtures = float(by_mixture.std(ddof=1))
    seeds = math.sqrt(float((residuals**2).sum()) / freedom)
    ratio = mixtures / seeds if seeds else math.inf if mixtures else 0.0
    return {
        "between_mixtures": mixtures,
        "between_seeds": seeds,
        "ratio": ratio,
        "are_distinguishable": ratio >= LEAST_RATIO,
    }


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paired difference of a held-out metric of two models, and its standard error.

    Both models predict the same tokens, so the difficulty of the text cancels in the standard
    error. The standard error is None if unknown. :func:`require_comparable` checks that the results
    have the same protocol and corpus. Its formula is that of a mean loss in
    ``artifacts.evaluation_result``, with the difference of the two models' sums in each cluster.
    """

    value: float
    error: float | None


def loss_difference(first: DomainLoss, second: DomainLoss) -> Difference:
    """Mean loss of ``first`` minus mean loss of ``second``, in nats per token."""
    return Difference(first.loss - second.loss, _paired_error(first, second, 1.0, 1.0))


def mean_perplexity_difference(first: EvaluationResult, second: EvaluationResult) -> Difference:
    """Mean perplexity of ``first`` minus mean perplexity of ``second``.

    To first order, the standard error of a perplexity p = exp(m) is p SE(m); the standard error of
    p - q is the standard error of the ratio with sums p S_c - q T_c, where S_c and T_c are the loss
    sums of the two models in cluster c.
    """
    pairs = [(domain, second.domains[name]) for name, domain in first.training_domains.items()]
    errors = [_paired_error(a, b, a.perplexity, b.perplexity) for a, b in pairs]
    return Difference(first.mean_perplexity - second.mean_perplexity, error_of_mean(errors))


def target_difference(first: EvaluationResult, second: EvaluationResult) -> Difference | None:
    """Target loss of ``first`` minus target loss of ``second``, in nats per token.

    None unless both have the same target.
    """
    one, other = first.target, second.target
    texts = {result.provenance.inputs.get("target text") for result in (first, second)}
    if one is None or other is None or one.shares != other.shares or len(texts) > 1:
        return None
    pairs = {name: (first.domains[name], second.domains[name]) for name in one.shares}
    errors = {name: _paired_error(a, b, 1.0, 1.0) for name, (a, b) in pairs.items()}
    return Difference(one.loss - other.loss, error_of_sum(one.shares, errors))


def _paired_error(
    first: DomainLoss, second: DomainLoss, first_scale: float, second_scale: float
) -> float | None:
    """Standard error of ``first_scale * first.loss - second_scale * second.loss``."""
    a, b = first.clusters, second.clusters
    scales = (first_scale, second_scale)
    if a is None or b is None or a.tokens != b.tokens or not all(map(math.isfinite, scales)):
        return None
    sums = [first_scale * x - second_scale * y for x, y in zip(a.losses, b.losses, strict=True)]
    return ratio_standard_error(sums, a.tokens)
