"""Exponentiated gradient ascent on domain weights, for DoReMi and DoGE.

Weights are stored as logarithms: none overflows, and none underflows to a zero from which it could
not recover.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_chameleon.mixture.checks import Array

# Logarithm of the smallest normal float.
LOWEST_LOG = math.log(np.finfo(np.float64).tiny)


def exponentiated_step(log_weights: Array, gains: Array, step_size: float, eps: float) -> Array:
    """The logarithm of (1 - eps) softmax(ln alpha + step_size gains) + eps / k; nothing overflows.

    The largest gain is subtracted before the multiplication, which changes no weight: only -inf, a
    weight of 0, is then possible.

    Args:
        log_weights: ln alpha, [k] float64.
        gains: gradient of each weight, [k] float64.
        step_size: factor of the gains.
        eps: uniform share.
    """
    with np.errstate(over="ignore"):
        logits = log_weights + step_size * (gains - gains.max())
    log_softmax = logits - np.logaddexp.reduce(logits)
    if eps > 0:
        share = math.log(eps) - math.log(len(logits))  # eps / k may underflow
        log_softmax = np.logaddexp(math.log1p(-eps) + log_softmax, share)
    floored: Array = np.maximum(log_softmax, LOWEST_LOG)
    return floored


def total_variation(one: Array, other: Array) -> float:
    """Half the sum of the absolute differences of two weight vectors."""
    return float(np.abs(one - other).sum() / 2)
