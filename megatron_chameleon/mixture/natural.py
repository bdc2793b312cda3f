"""Weights by how much text there is, with a temperature between natural and uniform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, check_positive


def natural_weights(tokens: npt.ArrayLike, temperature: float = 1.0) -> Array:
    """w_i proportional to n_i^(1/T), with n_i the tokens of domain i.

    T = 1 gives every token the same chance, a larger T moves towards uniform, one below 1 towards
    the largest domain. This is the T of multilingual pretraining; where a paper gives an exponent
    alpha (XLM-R 0.3, RegMix's prior 0.5), T is 1 / alpha.

    Args:
        tokens: n, [k], not negative, not all zero. A domain of none gets the weight 0.
        temperature: T, above 0.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: no vector, a negative or undefined count, no tokens at all, or a T that is not
            a finite number above 0.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if counts.ndim != 1 or not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("tokens must be a vector of finite numbers from 0 on")
    if not (counts > 0).any():
        raise ValueError("there are no tokens: give at least one domain text")
    check_positive(temperature, "temperature")
    # Relative to the largest, so that no T overflows; the logarithm of none is -inf.
    with np.errstate(divide="ignore", over="ignore"):
        powers = np.exp(np.log(counts / counts.max()) / temperature)
    weights: Array = powers / powers.sum()
    return weights
