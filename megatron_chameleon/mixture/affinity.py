"""Domain embeddings -> domain affinity."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, as_embeddings

# A centred entry is dropped when it is this many float64 steps of its column's largest value:
# it is then what the subtraction left over, not a difference between domains.
CENTERING_STEPS = 4


def center_embeddings(embeddings: npt.ArrayLike) -> Array:
    """Subtract the mean of the domains from each domain embedding.

    The embeddings are centred rather than K double-centred: subtracting means from a K whose
    entries are nearly equal loses the digits that matter. A second pass removes the rounding
    error of the first mean. Entries smaller than what float64 can tell apart in their column are
    set to zero, so that a domain at the mean has the norm 0 and not a norm of rounding errors,
    which a ridge relative to K would blow up.

    Args:
        embeddings: [k, h], any real dtype.

    Returns:
        [k, h] float64, a new array; its columns sum to zero.

    Raises:
        ValueError: not two-dimensional, empty, or not finite (the row is named).
    """
    original = as_embeddings(embeddings)
    centered: Array = original - original.mean(axis=0)
    centered -= centered.mean(axis=0)
    resolution = CENTERING_STEPS * np.finfo(np.float64).eps * np.abs(original).max(axis=0)
    centered[np.abs(centered) <= resolution] = 0.0
    return centered


def affinity_matrix(embeddings: npt.ArrayLike, center: bool) -> Array:
    """Inner products of the domain embeddings, K = X X^T.

    Chameleon (Xie, Tonin and Cevher, ICML 2025), section 3.1. With ``center`` the mean of the
    domains is taken off X first, which is K double-centred, as the authors' code does.

    Args:
        embeddings: [k, h], one row per domain, any real dtype; computed in float64.
        center: whether to subtract the mean over domains.

    Returns:
        [k, k] float64, symmetric and positive semi-definite. With ``center`` its rows sum to zero.

    Raises:
        ValueError: embeddings not two-dimensional, empty, not finite (the row is named), or so
            large that their inner products overflow.
    """
    features = center_embeddings(embeddings) if center else as_embeddings(embeddings)
    return gram_matrix(features)


def gram_matrix(features: Array) -> Array:
    """X X^T of features [k, h] that are already checked and, where wanted, centred."""
    squared_norms(features)
    affinity: Array = features @ features.T
    return affinity


def squared_norms(features: Array) -> Array:
    """The diagonal [k] of X X^T for checked features [k, h].

    No inner product is larger than the largest of them (Cauchy-Schwarz).

    Raises:
        ValueError: if they are too large to add up.
    """
    with np.errstate(over="ignore"):
        norms: Array = np.einsum("ij,ij->i", features, features)
        total = norms.sum()
    if not np.isfinite(total):
        raise ValueError(
            f"embeddings reach {float(np.abs(features).max()):.3g}, too large for their inner "
            "products: divide them all by a constant"
        )
    return norms
