"""New domains in a mixture whose other domains keep their ratios."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array


def placed_weights(weights: npt.ArrayLike, before: npt.ArrayLike, is_old: npt.ArrayLike) -> Array:
    """Give each new domain its share among all, and divide the rest as it was divided before.

    Args:
        weights: [k] of all domains, old and new, not negative, summing to 1.
        before: [k] earlier weights of the old domains; what new ones have here is not read.
        is_old: [k] bool.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: not three vectors of one length, or no old domain with a weight.
    """
    all_of_them = np.asarray(weights, dtype=np.float64)
    old = np.asarray(is_old, dtype=bool)
    earlier = np.where(old, np.asarray(before, dtype=np.float64), 0.0)
    if all_of_them.ndim != 1 or not all_of_them.shape == old.shape == earlier.shape:
        raise ValueError("weights, before and is_old must be vectors of one length")
    if not earlier.sum() > 0:
        raise ValueError("no old domain has a weight: there are no ratios to keep")
    rest = all_of_them[old].sum() / all_of_them.sum()
    result: Array = np.where(old, rest * earlier / earlier.sum(), all_of_them / all_of_them.sum())
    return result
