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
    wanted, most = (np.asarray(values, dtype=np.float64) for values in (weights, caps))
    if wanted.ndim != 1 or wanted.size == 0 or wanted.shape != most.shape:
        raise ValueError(
            f"weights {wanted.shape} and caps {most.shape} must be vectors of one length"
        )
    if not (np.isfinite(wanted).all() and (wanted >= 0).all() and wanted.sum() > 0):
        raise ValueError("weights must be finite, not negative, and not all zero")
    if not (most >= 0).all():  # or NaN
        raise ValueError("caps must be >= 0")
    wanted = wanted / wanted.sum()
    found = wanted
    if not (wanted <= most).all():
        present = np.flatnonzero(wanted)
        if most[present].sum() < 1.0 - ROUNDING:
            raise ValueError(
                f"the caps of the domains with a weight sum to {most[present].sum():.6g}, less "
                "than 1: raise them"
            )
        order = present[np.argsort(most[present] / wanted[present], kind="stable")]
        # With the first n domains at their caps, s is the rest over the sum of the others' weights.
        left = 1.0 - np.concatenate([[0.0], np.cumsum(most[order])[:-1]])
        others = np.cumsum(wanted[order][::-1])[::-1]
        fits = left / others * wanted[order] <= most[order]
        found = np.minimum(most, 1.0) * (wanted > 0)
        if fits.any():
            first = int(fits.argmax())
            free = order[first:]
            found[free] = wanted[free] * (left[first] / others[first])
    binding = np.flatnonzero((wanted > 0) & (found == most))
    return CappedWeights(found, tuple(binding.tolist()))
