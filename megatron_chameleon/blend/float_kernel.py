"""The greedy rule in float64, on as many stretches of samples as an int32 vector has lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.blend.tiles import TILE, finish_writing, write_tile
from megatron_chameleon.blend.vectors import LANES

# Domains are looked at in blocks, within which LLVM makes vector instructions of the lanes.
BLOCK = 8

ARGUMENTS = "(f8[::1], f8[::1], i8, i8, i2[::1], i8[::1])"
Kernel = Callable[..., int]


@functools.cache
def float_kernel(keep: bool) -> Kernel:
    """The compiled kernel for any number of domains that is a multiple of ``BLOCK``.

    Args:
        keep: whether it writes choices, or only counts.

    Returns:
        A function of weights [num_domains], counts [num_domains * LANES] (those of one domain in
        all lanes after another; brought up to the stretches' ends), the first sample, the length
        of a stretch, a multiple of the tile, and the two outputs [LANES * length].
    """

    @njit("void" + ARGUMENTS, cache=True, nogil=True)
    def run(
        weights: NDArray[np.float64],
        counts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        # Positions, largest errors and their domains; parts of one array, so that the compiler
        # knows that they do not overlap.
        work = np.empty(3 * LANES, np.float64)
        domains, numbers = np.empty(TILE * LANES, np.int16), np.empty(TILE * LANES, np.int64)
        for start in range(0, length, TILE):
            for step in range(TILE):
                for lane in range(LANES):
                    position = float(first + start + step + lane * length)
                    work[lane] = position if position > 1.0 else 1.0
                    work[LANES + lane], work[2 * LANES + lane] = -np.inf, 0.0
                for i in range(0, weights.size, BLOCK):
                    _look(weights[i : i + BLOCK], counts[i * LANES : (i + BLOCK) * LANES], i, work)
                for lane in range(LANES):
                    domains[step * LANES + lane] = np.int16(work[2 * LANES + lane])
                _count(domains, numbers, counts, step * LANES)
            if keep:
                write_tile(domains, numbers, start, length, dataset_index, dataset_sample_index)
        finish_writing()

    return run


@njit(inline="always")
def _look(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    first: int,
    work: NDArray[np.float64],
) -> None:
    """Look for a larger error among a block of domains, of which ``first`` is the first."""
    for lane in range(LANES):
        position = work[lane]
        # Two chains of comparisons, which do not wait for each other.
        error, domain = work[LANES + lane], work[2 * LANES + lane]
        for i in range(BLOCK // 2):
            own = weights[i] * position - counts[i * LANES + lane]
            domain = float(first + i) if own > error else domain
            error = own if own > error else error
        late_error, late_domain = -np.inf, 0.0
        for i in range(BLOCK // 2, BLOCK):
            own = weights[i] * position - counts[i * LANES + lane]
            late_domain = float(first + i) if own > late_error else late_domain
            late_error = own if own > late_error else late_error
        work[LANES + lane] = late_error if late_error > error else error
        work[2 * LANES + lane] = late_domain if late_error > error else domain


@njit(inline="always")
def _count(
    domains: NDArray[np.int16],
    numbers: NDArray[np.int64],
    counts: NDArray[np.float64],
    row: int,
) -> None:
    """Give every lane's domain the sample; its number goes to ``numbers``."""
    for lane in range(LANES):
        # Unsigned, which spares the test for a place counted from the end.
        place = np.uint64(np.int64(domains[row + lane]) * LANES + lane)
        count = counts[place]
        numbers[row + lane] = np.int64(count)
        counts[place] = count + 1.0
