"""How alike domains are: cosines of their embeddings, and the nearest of each."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.mixture.checks import Array

# Rows of cosines held at once: [1024, k] float64 is 40 MB for 5000 domains.
BLOCK_ROWS = 1024


def unit_rows(features: Array) -> Array:
    """Features [k, h] with each row divided by its norm; a row of zeros stays one."""
    largest = np.abs(features).max(axis=1, keepdims=True)
    scaled = features / np.where(largest > 0, largest, 1.0)  # squares of huge or tiny rows are safe
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    units: Array = scaled / np.where(norms > 0, norms, 1.0)
    return units


def correlations(features: Array) -> Array:
    """Cosines [k, k] between the rows of ``features`` [k, h], in [-1, 1]; 0 for a row of zeros."""
    units = unit_rows(features)
    cosines: Array = np.clip(units @ units.T, -1.0, 1.0)
    return cosines


def nearest_rows(
    features: Array, count: int, rows: np.ndarray | None = None
) -> tuple[np.ndarray, Array]:
    """For each row the ``count`` others of the largest cosine, nearest first.

    Costs r k h, in memory of ``BLOCK_ROWS`` * k.

    Args:
        features: [k, h] float64.
        count: at least 0; fewer are given where there are fewer others.
        rows: [r] positions of the rows asked for; all k of them unless given.

    Returns:
        positions [r, n] int64 and cosines [r, n], n = min(count, k - 1).
    """
    units = unit_rows(features)
    asked = np.arange(len(units)) if rows is None else rows
    size = min(count, len(units) - 1)
    positions = np.empty((len(asked), size), dtype=np.int64)
    cosines = np.empty((len(asked), size))
    for first in range(0, len(asked), BLOCK_ROWS):
        part = slice(first, min(first + BLOCK_ROWS, len(asked)))
        block = units[asked[part]] @ units.T
        each = np.arange(len(block))
        block[each, asked[part]] = -np.inf
        for rank in range(size):  # a few passes cost less than sorting every row
            best = block.argmax(axis=1)
            positions[part, rank], cosines[part, rank] = best, block[each, best]
            block[each, best] = -np.inf
    return positions, np.clip(cosines, -1.0, 1.0)
