"""Exponentiated gradient ascent on domain weights, for DoReMi and DoGE.

Weights are stored as logarithms, so that they neither overflow nor underflow to 0. A weight of 0
could never grow again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import numpy as np

from megatron_chameleon.mixture.checks import Array

# Logarithm of the smallest normal float.
LOWEST_LOG = math.log(np.finfo(np.float64).tiny)


@dataclasses.dataclass(frozen=True)
class WeightState:
    """Domain weights after a number of steps, and their running mean.

    Attributes:
        log_weights: ln alpha of the domains that are trained on, float64.
        mean: mean of alpha over steps, the resulting mixture.
        counted: number of weight vectors in the mean.
        moved: sum over steps of the total variation distance between consecutive alphas.
    """

    log_weights: Array
    mean: Array
    counted: int
    moved: float

    @property
    def weights(self) -> Array:
        """The weights alpha, float64, summing to 1."""
        weights: Array = np.exp(self.log_weights)
        return weights / weights.sum()

    def with_weights(self, log_weights: Array, **others: Any) -> Self:
        """Return the next step's state, with new ``log_weights`` and new values of other fields."""
        counted = self.counted + 1
        new = dataclasses.replace(self, log_weights=log_weights, counted=counted, **others)
        distance = float(np.abs(self.weights - new.weights).sum() / 2)
        mean = self.mean + (new.weights - self.mean) / counted
        return dataclasses.replace(new, mean=mean, moved=self.moved + distance)


def exponentiated_step(log_weights: Array, gains: Array, step_size: float, eps: float) -> Array:
    """Compute log((1 - eps) softmax(ln alpha + step_size gains) + eps / k) without overflow.

    The largest gain is subtracted before the multiplication. The subtraction changes no weight, and
    the product can then only overflow to -inf, which is a weight of 0.

    Args:
        log_weights: ln alpha, [k] float64.
        gains: gradient of each weight, [k] float64.
        step_size: factor of the gains.
        eps: share of the uniform distribution.
    """
    with np.errstate(over="ignore"):
        logits = log_weights + step_size * (gains - gains.max())
    log_softmax = logits - np.logaddexp.reduce(logits)
    if eps > 0:
        share = math.log(eps) - math.log(len(logits))  # logs, as eps / k may underflow
        log_softmax = np.logaddexp(math.log1p(-eps) + log_softmax, share)
    return np.maximum(log_softmax, LOWEST_LOG)
