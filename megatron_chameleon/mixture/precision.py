"""What the resamples of a bootstrap say: which domain outweighs which, and what would be enough."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, check_positive
from megatron_chameleon.mixture.uncertainty import BootstrapResult

# One domain with nearly all of the weight.
ONE_HOT = 0.95


def outweighing_probability(
    resampled: BootstrapResult, one: npt.ArrayLike, other: npt.ArrayLike
) -> Array:
    """The share of the resamples in which a domain weighs more than another; ties count half.

    Args:
        resampled: the weights over resamples.
        one: [n] positions of domains.
        other: [n] positions of those that they are compared with.

    Returns:
        [n] float64; with ``one`` and ``other`` exchanged, 1 less it.
    """
    weights = resampled.weights
    difference = (
        weights[:, np.asarray(one, dtype=np.intp)] - weights[:, np.asarray(other, dtype=np.intp)]
    )
    likely: Array = (difference > 0).mean(axis=0) + (difference == 0).mean(axis=0) / 2
    return likely


def windows_needed(half_width: float, num_windows: int, precision: float) -> int:
    """Windows per domain at which the widest interval would be about +- ``precision``.

    The standard error of a mean over n windows goes with n^-1/2, and the weights are smooth in the
    means; so the domains need (half width / precision)^2 times the windows that they had.

    Args:
        half_width: half the width of the widest interval, with ``num_windows`` windows.
        num_windows: per domain; the fewest that a domain had.
        precision: above 0.

    Raises:
        ValueError: if ``precision`` is not a finite number above 0.
    """
    return math.ceil(num_windows * (half_width / check_positive(precision, "precision")) ** 2)


def is_within_noise_of_uniform(resampled: BootstrapResult) -> bool:
    """Whether every interval holds 1 / k."""
    uniform = 1.0 / len(resampled.low)
    return bool(((resampled.low <= uniform) & (uniform <= resampled.high)).all())


def is_one_hot(resampled: BootstrapResult) -> bool:
    """Whether one of several domains has nearly all of the weight in most resamples."""
    return bool(len(resampled.low) > 1 and np.median(resampled.weights.max(axis=1)) > ONE_HOT)
