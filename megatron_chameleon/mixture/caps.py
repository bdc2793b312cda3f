"""The mixture nearest to given weights with an upper bound for each weight."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array

# Caps that sum to 1 up to rounding are accepted.
ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class CappedWeights:
    """Weights under caps, and which caps bind."""

    weights: Array
    """[k] float64, summing to 1."""

    binding: tuple[int, ...]
    """Positions of the domains at their cap."""


def capped_weights(weights: npt.ArrayLike, caps: npt.ArrayLike) -> CappedWeights:
    """The mixture w with w_i <= c_i nearest to p in Kullback-Leibler divergence.

    Minimising sum_i w_i log(w_i / p_i) over the simplex under the caps, domains below
    their cap keep their ratios: w_i = min(c_i, s p_i) with the s for which the sum is 1 (by the
    Karush-Kuhn-Tucker conditions; the reverse divergence has the same minimum). Caps bind in the
    order of c_i / p_i, in which s is searched.

    Args:
        weights: p, [k], not negative, summing to 1. Domains of weight 0 keep it.
        caps: c, [k], not negative; infinity for no cap.

    Raises:
        ValueError: not two vectors of one length, an entry that is negative or NaN, or caps of the
            domains with a weight that sum to less than 1.
    """
    target, upper = (np.asarray(values, dtype=np.float64) for values in (weights, caps))
    if target.ndim != 1 or target.size == 0 or target.shape != upper.shape:
        raise ValueError(
            f"weights {target.shape} and caps {upper.shape} must be vectors of one length"
        )
    if not (np.isfinite(target).all() and (target >= 0).all() and target.sum() > 0):
        raise ValueError("weights must be finite, not negative, and not all zero")
    if not (upper >= 0).all():  # or NaN
        raise ValueError("caps must be >= 0")
    target = target / target.sum()
    found = target
    if not (target <= upper).all():
        present = np.flatnonzero(target)
        if upper[present].sum() < 1.0 - ROUNDING:
            raise ValueError(
                f"the caps of the domains with a weight sum to {upper[present].sum():.6g}, less "
                "than 1: raise them"
            )
        order = present[np.argsort(upper[present] / target[present], kind="stable")]
        # With the first n domains at their caps, s is the rest over the sum of the others' weights.
        left = 1.0 - np.concatenate([[0.0], np.cumsum(upper[order])[:-1]])
        others = np.cumsum(target[order][::-1])[::-1]
        fits = left / others * target[order] <= upper[order]
        found = np.minimum(upper, 1.0) * (target > 0)
        if fits.any():
            first = int(fits.argmax())
            free = order[first:]
            found[free] = target[free] * (left[first] / others[first])
    binding = np.flatnonzero((target > 0) & (found == upper))
    return CappedWeights(found, tuple(binding.tolist()))
