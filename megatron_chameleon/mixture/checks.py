"""Argument checks shared by the modules of this package.

Every function raises ``ValueError`` with one line that names the argument, the problem and the fix.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Mode: TypeAlias = Literal["pretrain", "finetune"]

# Two entries of an affinity count as equal if their relative difference is at most this value.
AFFINITY_TOLERANCE = 1e-8


def as_matrix(values: npt.ArrayLike, argument: str = "embeddings", row: str = "domain") -> Array:
    """Return ``values`` as a finite float64 matrix with at least one row and one column.

    ``argument`` and ``row`` name the array and one of its rows in messages; by default they are
    domain embeddings [k, h].
    """
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(
            f"{argument} has shape {matrix.shape}: must be [rows, features], with at least one "
            f"{row} and one feature"
        )
    finite_rows = np.isfinite(matrix).all(axis=1)
    if not finite_rows.all():
        bad = int(np.argmin(finite_rows))
        raise ValueError(
            f"{argument} row {bad} holds NaN or infinity: recompute or drop that {row}"
        )
    return matrix


def as_affinity(affinity: npt.ArrayLike) -> Array:
    """Return an affinity matrix as an exactly symmetric float64 array [k, k].

    Rounding differences between the two triangles are averaged. A Gram matrix has
    |K_ij|^2 <= K_ii K_jj (Cauchy-Schwarz); checking only these 2 x 2 minors costs k^2, not k^3.
    """
    matrix = as_matrix(affinity, "affinity")
    fix = "build it with affinity_matrix(embeddings, center=...)"
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"affinity must be square, but has shape {matrix.shape}: {fix}")
    norms = np.sqrt(np.maximum(np.diagonal(matrix), 0.0))
    asymmetry = np.abs(matrix - matrix.T)
    errors = np.maximum(asymmetry, np.abs(matrix) - np.outer(norms, norms))
    if errors.max() > AFFINITY_TOLERANCE * float(np.abs(matrix).max()):
        i, j = divmod(int(errors.argmax()), len(matrix))
        raise ValueError(
            f"affinity is not a Gram matrix: entry [{i}, {j}] is {matrix[i, j]:.6g}, entry "
            f"[{j}, {i}] is {matrix[j, i]:.6g}, and the norms are {norms[i]:.6g} and "
            f"{norms[j]:.6g}: {fix}"
        )
    return (matrix + matrix.T) / 2 if asymmetry.any() else matrix


def as_scores(scores: npt.ArrayLike) -> Array:
    """Return leverage scores as a finite, non-negative float64 vector [k].

    Negative rounding errors become zero.
    """
    vector = np.asarray(scores, dtype=np.float64)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(
            f"scores must be a vector with one entry per domain, but has shape {vector.shape}: "
            "pass leverage_scores(affinity, ridge)"
        )
    low = -AFFINITY_TOLERANCE * np.fmax.reduce(np.abs(vector))
    # NaN is rejected too, since both comparisons with NaN are false.
    valid = (vector >= low) & (vector <= np.finfo(np.float64).max / vector.size)
    if not valid.all():
        bad = int(valid.argmin())
        raise ValueError(
            f"scores entry {bad} is {vector[bad]:.6g}, but a leverage score lies between 0 and 1: "
            "pass leverage_scores(affinity, ridge)"
        )
    return np.maximum(vector, 0.0)


def check_positive(value: float, argument: str) -> float:
    """Return ``value`` as a float; raise unless it is finite and > 0."""
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{argument} is {value!r}: must be finite and > 0")
    return number


def check_mode(mode: str) -> None:
    """Raise unless ``mode`` is "pretrain" or "finetune"."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}: choose one of {', '.join(get_args(Mode))}")
