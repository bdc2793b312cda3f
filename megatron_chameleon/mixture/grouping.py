"""Fewer vectors for the bootstrap: means of groups of windows, where there are many domains."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Of all domains together, kept for the bootstrap: 1 GiB in float32. 80 domains of 4096 windows,
# 768 wide, are below it.
MAX_VALUES = 1 << 28
# A variance from fewer groups would itself be noise: its own error is 1 / sqrt(2 * 31) = 13% here.
FEWEST_GROUPS = 32


def group_size(num_domains: int, num_windows: int, width: int) -> int:
    """Windows in a group, for all domains' groups to have at most ``MAX_VALUES`` values.

    1, which groups nothing, as long as the windows themselves have no more.

    Args:
        num_domains: k.
        num_windows: of a domain.
        width: h, features of a window.
    """
    most = max(FEWEST_GROUPS, MAX_VALUES // max(1, num_domains * width))
    return max(1, math.ceil(num_windows / most))


def grouped_windows(
    vectors: npt.NDArray[np.floating], size: int, seed: int
) -> npt.NDArray[np.floating]:
    """Means of random groups of ``size`` windows; resampling them is a bootstrap, too.

    The mean of n / g resampled groups of g windows has the variance of the mean of n resampled
    windows: a group's mean has the g-th part of a window's variance. Windows beyond the last whole
    group are left out, and the groups are moved so that their mean is that of all windows.

    Args:
        vectors: [n, h], any real dtype; sums are taken in float64.
        size: g, windows in a group; smaller where there would be fewer than ``FEWEST_GROUPS``.
        seed: of the draw of the groups.

    Returns:
        [n // g, h], float32 where g is above 1 and the vectors as they are where it is 1.
    """
    size = min(size, max(1, len(vectors) // FEWEST_GROUPS))
    if size == 1:
        return vectors
    order = np.random.default_rng([seed, len(vectors)]).permutation(len(vectors))
    count = len(vectors) // size
    drawn = vectors[order[: count * size]].reshape(count, size, -1)
    means = drawn.mean(axis=1, dtype=np.float64)
    means += vectors.mean(axis=0, dtype=np.float64) - means.mean(axis=0)
    return means.astype(np.float32)
