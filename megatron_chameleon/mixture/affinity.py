"""Affinity of domains: inner products and cosines of their embeddings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, as_matrix

# A centred entry is treated as a rounding error if its ratio to the largest value of its column is
# at most this many machine epsilons.
CENTERING_STEPS = 4


def center_embeddings(embeddings: npt.ArrayLike) -> Array:
    """Subtract the mean of the domains from each domain embedding.

    Double-centring K = X X^T instead would lose significant digits, since the entries of K are
    nearly equal. A second pass removes the rounding error of the first mean. Entries below the
    float64 resolution of their column are set to zero, so that a domain at the mean has norm 0.
    Otherwise a ridge relative to K would amplify its rounding errors.

    Args:
        embeddings: [k, h], any real dtype.

    Returns:
        [k, h] float64, a new array; its columns sum to zero.

    Raises:
        ValueError: if ``embeddings`` is not two-dimensional, is empty, or is not finite (the
            message names the row).
    """
    original = as_matrix(embeddings)
    centered: Array = original - original.mean(axis=0)
    centered -= centered.mean(axis=0)
    resolution = CENTERING_STEPS * np.finfo(np.float64).eps * np.abs(original).max(axis=0)
    centered[np.abs(centered) <= resolution] = 0.0
    return centered


def affinity_matrix(embeddings: npt.ArrayLike, center: bool) -> Array:
    """Inner products of the domain embeddings, K = X X^T.

    Chameleon (Xie, Tonin and Cevher, ICML 2025), section 3.1. With ``center``, the mean over
    domains is subtracted from X first, which double-centres K, as in the authors' code.

    Args:
        embeddings: [k, h], one row per domain, any real dtype; computed in float64.
        center: whether to subtract the mean over domains.

    Returns:
        [k, k] float64, symmetric and positive semi-definite. With ``center`` its rows sum to zero.

    Raises:
        ValueError: if ``embeddings`` is not two-dimensional, is empty, is not finite (the message
            names the row), or is so large that inner products overflow.
    """
    features = center_embeddings(embeddings) if center else as_matrix(embeddings)
    return gram_matrix(features)


def gram_matrix(features: Array) -> Array:
    """Compute X X^T of features [k, h] that have been checked and, if requested, centred."""
    squared_norms(features)
    return features @ features.T


def squared_norms(features: Array) -> Array:
    """Compute the diagonal [k] of X X^T for checked features [k, h].

    If the diagonal is finite, so is all of X X^T (Cauchy-Schwarz).

    Raises:
        ValueError: if the sum of the diagonal overflows.
    """
    with np.errstate(over="ignore"):
        norms: Array = np.einsum("ij,ij->i", features, features)
        total = norms.sum()
    if not np.isfinite(total):
        raise ValueError(
            f"inner products of embeddings with values up to {float(np.abs(features).max()):.3g} "
            "overflow: divide all embeddings by a constant"
        )
    return norms


def unit_rows(features: Array) -> Array:
    """Divide each row of the features [k, h] by its norm; rows of zeros are unchanged."""
    largest = np.abs(features).max(axis=1, keepdims=True)
    # Scale before squaring, so that squares do not overflow.
    scaled = features / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    return scaled / np.where(norms > 0, norms, 1.0)


def nearest_rows(features: Array, count: int, rows: np.ndarray) -> tuple[np.ndarray, Array]:
    """Find the ``count`` nearest other rows of each of ``rows``, by cosine, nearest first.

    Args:
        features: [k, h] float64.
        count: >= 0; reduced to the number of other rows if larger.
        rows: [r] int64, positions of the rows whose neighbours are searched.

    Returns:
        positions [r, n] int64 and cosines [r, n], n = min(count, k - 1).
    """
    units = unit_rows(features)
    cosines = units[rows] @ units.T
    cosines[np.arange(len(rows)), rows] = -np.inf
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, : min(count, len(units) - 1)]
    return nearest, np.clip(np.take_along_axis(cosines, nearest, axis=1), -1.0, 1.0)
