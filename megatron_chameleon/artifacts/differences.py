"""What one model's held-out figures are above another's, and how sure that is.

The error is the paired one: both models predict the same tokens, and what is hard for both alike
cancels out. The results have the same protocol, corpus and domains (``require_comparable``).
"""

from __future__ import annotations

import dataclasses
import math

from megatron_chameleon.artifacts.clusters import error_of_mean, ratio_standard_error
from megatron_chameleon.artifacts.evaluation_result import DomainLoss, EvaluationResult


@dataclasses.dataclass(frozen=True)
class Difference:
    """``value`` with its standard error, which is None where it is not known."""

    value: float
    error: float | None


def loss_difference(first: DomainLoss, second: DomainLoss) -> Difference:
    """Mean loss of ``first`` minus that of ``second``, in nats per token."""
    return Difference(first.loss - second.loss, _paired_error(first, second, 1.0, 1.0))


def mean_perplexity_difference(first: EvaluationResult, second: EvaluationResult) -> Difference:
    """Average perplexity of ``first`` minus that of ``second``.

    A perplexity p = exp(m) has, to first order, the error p SE(m): that of p - q is the error of
    the ratio whose sums are p S_c - q T_c, with S_c and T_c the two models' sums over cluster c.
    """
    pairs = [(domain, second.domains[name]) for name, domain in first.domains.items()]
    errors = [_paired_error(a, b, a.perplexity, b.perplexity) for a, b in pairs]
    return Difference(first.mean_perplexity - second.mean_perplexity, error_of_mean(errors))


def _paired_error(
    first: DomainLoss, second: DomainLoss, first_scale: float, second_scale: float
) -> float | None:
    """Of ``first_scale`` times the loss of ``first`` minus the same of ``second``."""
    a, b = first.clusters, second.clusters
    scales = (first_scale, second_scale)
    if a is None or b is None or a.tokens != b.tokens or not all(map(math.isfinite, scales)):
        return None
    sums = [first_scale * x - second_scale * y for x, y in zip(a.losses, b.losses, strict=True)]
    return ratio_standard_error(sums, a.tokens)
