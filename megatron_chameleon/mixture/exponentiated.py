"""Exponentiated gradient ascent on domain weights, as DoReMi and DoGE take it.

Weights are kept as logarithms, so that none of them overflows, and none falls to a zero from which
it could not come back.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_chameleon.mixture.checks import Array

# Below the logarithm of the smallest normal float a weight is 0 as a number.
LOWEST_LOG = math.log(np.finfo(np.float64).tiny)


def exponentiated_step(log_weights: Array, gains: Array, step_size: float, eps: float) -> Array:
    """The logarithm of (1 - eps) softmax(ln alpha + step_size gains) + eps / k; nothing overflows.

    The largest gain is subtracted before it is multiplied, which changes no weight; what overflows
    then is the -inf of a weight that is 0.

    Args:
        log_weights: ln alpha, [k] float64.
        gains: what speaks for each domain, [k] float64.
        step_size: by which they are multiplied.
        eps: share that is uniform.
    """
    with np.errstate(over="ignore"):
        logits = log_weights + step_size * (gains - gains.max())
    log_softmax = logits - np.logaddexp.reduce(logits)
    if eps > 0:
        share = math.log(eps) - math.log(len(logits))  # eps / k itself may be too small for a float
        log_softmax = np.logaddexp(math.log1p(-eps) + log_softmax, share)
    floored: Array = np.maximum(log_softmax, LOWEST_LOG)
    return floored


def total_variation(one: Array, other: Array) -> float:
    """Half the sum of the absolute differences of two weight vectors."""
    return float(np.abs(one - other).sum() / 2)
