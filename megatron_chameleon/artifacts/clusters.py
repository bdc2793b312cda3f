"""Standard errors of mean losses, from sums over clusters of documents.

Tokens of one document are correlated, and so are windows of one document; documents are taken as
independent. A mean loss is then a ratio of two sums over documents, with the standard error of a
ratio (Cochran, Sampling Techniques, 3rd edition, 1977, equation 6.13 without the finite-population
correction): for sums S_c of losses over sizes n_c of C clusters, and m = sum(S_c) / sum(n_c),

    SE(m)^2 = C / (C - 1) * sum((S_c - m n_c)^2) / sum(n_c)^2

For the difference of two models on the same tokens, S_c is the difference of their sums in c.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_chameleon.artifacts.record import Count, Positive

# Enough to estimate a standard error to 4%, while there may be millions of documents.
MAX_CLUSTERS = 256


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Sums over the clusters of a domain, in the order of the text.

    A cluster is one document or, of more than ``MAX_CLUSTERS`` documents, a group of consecutive
    ones. All models that are evaluated by one protocol on one corpus have the same clusters.

    Attributes:
        losses: [c] negative log-likelihoods, in nats.
        tokens: [c] predicted tokens, each at least 1.
        text_bytes: [c] bytes of the text of these tokens; None if unknown.
    """

    losses: list[float]
    tokens: list[Positive]
    text_bytes: list[Count] | None = None

    def __post_init__(self) -> None:
        if {len(self.tokens), len(self.text_bytes or self.tokens)} != {len(self.losses)}:
            raise ValueError("losses, tokens and text_bytes have different lengths")


def ratio_standard_error(sums: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Standard error of sum(sums) / sum(sizes), both [c]; None for fewer than two clusters."""
    numerators, denominators = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    count, total = len(numerators), float(denominators.sum())
    if count < 2 or total == 0:
        return None
    residuals = numerators - numerators.sum() / total * denominators
    return math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total


def error_of_mean(errors: Iterable[float | None]) -> float | None:
    """Standard error of a mean of independent values, from theirs; None if one is unknown."""
    known = list(errors)
    squares = [error**2 for error in known if error is not None]
    if not known or len(squares) < len(known):
        return None
    return math.sqrt(math.fsum(squares)) / len(known)
