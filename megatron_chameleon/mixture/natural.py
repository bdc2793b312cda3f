"""Weights proportional to the domain sizes, with a temperature towards uniform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, check_positive


def natural_weights(tokens: npt.ArrayLike, temperature: float = 1.0) -> Array:
    """w_i proportional to n_i^(1/T), with n_i the tokens of domain i.

    T = 1 samples every token with the same probability, T > 1 moves towards uniform, T < 1 towards
    the largest domain. This is the T of multilingual pretraining; for the exponent alpha of a paper
    (XLM-R 0.3, RegMix's prior 0.5), T is 1 / alpha.

    Args:
        tokens: n, [k], not negative, not all zero. A domain without tokens gets the weight 0.
        temperature: T, above 0.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: not a vector, a count that is negative or not finite, no tokens at all, or a T
            that is not finite and > 0.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if counts.ndim != 1 or not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("tokens must be a vector of finite numbers >= 0")
    if not (counts > 0).any():
        raise ValueError("no tokens: at least one domain needs text")
    check_positive(temperature, "temperature")
    # Relative to the largest, so that no T overflows; the logarithm of 0 is -inf.
    with np.errstate(divide="ignore", over="ignore"):
        powers = np.exp(np.log(counts / counts.max()) / temperature)
    weights: Array = powers / powers.sum()
    return weights
