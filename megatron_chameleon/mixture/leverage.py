"""Kernel ridge leverage scores (KRLS), from the affinity [k, k] or from the features [k, p].

S_i = [K (K + k * ridge * I)^-1]_ii (Chameleon, Xie, Tonin and Cevher, ICML 2025, Definition
"Domain KRLS"). S lies in [0, 1); its sum is the effective dimension of the domains at that ridge.
A high score means that a domain is hard to write as a combination of the others.

With K = U diag(sigma) U^T the score is sum_j sigma_j / (sigma_j + k * ridge) * U_ij^2. (The
appendix of the paper omits the factor k of the Definition.)
"""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
from scipy import linalg

from megatron_chameleon.mixture.checks import Array, as_affinity, as_matrix, check_positive

# Maximum of trace / (k * ridge) for which Cholesky is used. The scores then have an error of about
# eps * trace / (k * ridge) <= 2e-10. Above the maximum, the slower spectral form is used, which can
# exclude the null space.
CHOLESKY_LIMIT = 1e6


def leverage_scores(affinity: npt.ArrayLike, ridge: float) -> Array:
    """Compute the kernel ridge leverage scores diag(K (K + k * ridge * I)^-1) of an affinity.

    Uses Cholesky if K + k * ridge * I is well conditioned and eigh otherwise; no inverse is formed.
    Duplicate domains and affinities of low rank are supported. Time grows as k^3.

    Args:
        affinity: K, [k, k], symmetric positive semi-definite, any real dtype; float64 inside.
        ridge: lambda > 0, in the units of K (squared embedding units).

    Returns:
        [k] float64 scores in [0, 1).

    Raises:
        ValueError: if ``affinity`` is empty, not square, not symmetric, not finite or not a Gram
            matrix, or ``ridge`` is not above 0.
    """
    kernel = as_affinity(affinity)
    shift = kernel.shape[0] * check_positive(ridge, "ridge")
    if float(np.trace(kernel)) <= CHOLESKY_LIMIT * shift:
        # Cholesky fails only if K has an eigenvalue below -k * ridge, which the spectral form
        # reports.
        with contextlib.suppress(linalg.LinAlgError):
            factor = linalg.cho_factor(kernel + shift * np.eye(len(kernel)), lower=True)
            # With A = K + k * ridge * I, S_i = sum_j K_ij (A^-1)_ij is exactly 0 for a row of zeros
            # in K; the equivalent 1 - k * ridge * (A^-1)_ii would not be.
            solved = linalg.cho_solve(factor, kernel)
            return np.clip(np.diagonal(solved), 0.0, 1.0)
    eigenvalues, eigenvectors = linalg.eigh(kernel)
    tolerance = kernel.shape[0] * np.finfo(np.float64).eps * float(np.abs(eigenvalues).max())
    # Rounding errors of eigh alone give eigenvalues above -tolerance. The factor 1e4 also allows
    # for rounding errors in K.
    if float(eigenvalues[0]) < -1e4 * tolerance:
        raise ValueError(
            f"affinity has the eigenvalue {float(eigenvalues[0]):.6g}, but a matrix of inner "
            "products has no eigenvalue below 0: build it with affinity_matrix(embeddings, ...)"
        )
    # Eigenvalues that are zero up to rounding belong to the null space. At a small ridge they would
    # otherwise count as whole dimensions.
    eigenvalues[eigenvalues <= tolerance] = 0.0
    return _weighted_leverage(eigenvectors, eigenvalues, shift)


def feature_ridge_leverage(features: npt.ArrayLike, ridge: float) -> Array:
    """Compute ridge leverage scores in feature space, diag(X (X^T X + k * ridge * I)^-1 X^T).

    The result equals ``leverage_scores(X X^T, ridge)`` by the first lemma of the paper's appendix
    (stated there for a ridge of lambda; here the ridge is k * lambda, as in the definition of the
    domain scores). Time grows as k p^2 instead of k^3, so this form is faster with more domains
    than features.

    Args:
        features: X, [k, p], any real dtype; float64 inside; this function does not centre them.
        ridge: lambda > 0, in the units of X X^T.

    Returns:
        [k] float64 scores in [0, 1).

    Raises:
        ValueError: if ``features`` is not two-dimensional, is empty or is not finite, or ``ridge``
            is not above 0.
    """
    matrix = as_matrix(features, "features")
    shift = matrix.shape[0] * check_positive(ridge, "ridge")
    if float(np.square(matrix).sum()) > CHOLESKY_LIMIT * shift:
        left, singular, _ = linalg.svd(matrix, full_matrices=False)
        return _weighted_leverage(left, np.square(singular), shift)
    gram = matrix.T @ matrix
    lower = linalg.cholesky(gram + shift * np.eye(len(gram)), lower=True)
    # S_i = |L^-1 x_i|^2, where L L^T = X^T X + k * ridge * I, is never negative and never above 1.
    whitened = linalg.solve_triangular(lower, matrix.T, lower=True)
    return np.minimum(np.square(whitened).sum(axis=0), 1.0)


def _weighted_leverage(vectors: Array, eigenvalues: Array, shift: float) -> Array:
    """Compute S_i = sum_j sigma_j / (sigma_j + shift) U_ij^2 for U [k, r] and sigma [r]."""
    scores: Array = np.square(vectors) @ (eigenvalues / (eigenvalues + shift))
    return np.minimum(scores, 1.0)
