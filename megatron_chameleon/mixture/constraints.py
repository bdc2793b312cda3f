"""Mixtures under constraints: an upper bound for each weight, or ratios that are kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array

# Caps that sum to 1 up to rounding are accepted.
ROUNDING = 1e-12


def capped_weights(weights: npt.ArrayLike, caps: npt.ArrayLike) -> Array:
    """The mixture w with w_i <= c_i nearest to p in Kullback-Leibler divergence.

    At the minimum of sum_i w_i log(w_i / p_i), domains below their cap keep their ratios:
    w_i = min(c_i, s p_i), with the s for which the sum is 1 (by the Karush-Kuhn-Tucker conditions;
    the reverse divergence has the same minimum). Caps bind in the order of c_i / p_i, so s is found
    by sorting.

    Args:
        weights: p, [k], not negative, summing to 1. Domains of weight 0 keep it.
        caps: c, [k], not negative; infinity for no cap.

    Returns:
        [k] float64, summing to 1; a weight at its cap equals it exactly.

    Raises:
        ValueError: not two vectors of one length, or caps of the domains with a weight that sum to
            less than 1.
    """
    target, upper = (np.asarray(values, dtype=np.float64) for values in (weights, caps))
    if target.ndim != 1 or target.size == 0 or target.shape != upper.shape:
        raise ValueError(
            f"weights {target.shape} and caps {upper.shape} must be vectors of one length"
        )
    target = target / target.sum()
    if (target <= upper).all():
        return target
    present = np.flatnonzero(target)
    if upper[present].sum() < 1.0 - ROUNDING:
        raise ValueError(
            f"the caps of the domains with a weight sum to {upper[present].sum():.6g}, less than "
            "1: raise them"
        )
    order = present[np.argsort(upper[present] / target[present], kind="stable")]
    # With the first n domains at their caps, s is the rest over the sum of the others' weights.
    left = 1.0 - np.concatenate([[0.0], np.cumsum(upper[order])[:-1]])
    others = np.cumsum(target[order][::-1])[::-1]
    fits = left / others * target[order] <= upper[order]
    found: Array = np.minimum(upper, 1.0) * (target > 0)
    if fits.any():
        first = int(fits.argmax())
        free = order[first:]
        found[free] = target[free] * (left[first] / others[first])
    return found


def placed_weights(weights: npt.ArrayLike, before: npt.ArrayLike, is_old: npt.ArrayLike) -> Array:
    """Add new domains to a mixture whose old domains keep their ratios.

    Args:
        weights: [k] of all domains, old and new, >= 0, summing to 1.
        before: [k] earlier weights of the old domains; entries of new ones are ignored.
        is_old: [k] bool.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: no old domain with a weight.
    """
    new = np.asarray(weights, dtype=np.float64)
    old = np.asarray(is_old, dtype=bool)
    earlier = np.where(old, np.asarray(before, dtype=np.float64), 0.0)
    if not earlier.sum() > 0:
        raise ValueError("no old domain has a weight: there are no ratios to keep")
    rest = new[old].sum() / new.sum()
    return np.where(old, rest * earlier / earlier.sum(), new / new.sum())
