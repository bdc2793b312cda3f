"""Kernels that follow the greedy rule in every lane of the vector registers at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Samples that each lane takes before they are written out.
TILE = 32
# Up to so many domains, a kernel of their own number holds one loop over the lanes that LLVM
# unrolls over the domains; beyond, it gives up on that, and domains come in blocks.
MOST_UNROLLED = 32
# Lanes: twice as many would keep more arithmetic under way, but also twice as many places to write
# to.
LANES, COUNTING_LANES, BLOCK_LANES = 16, 32, 32
BLOCK = 8
# Up to so many domains it is faster to add 0 or 1 to every count than 1 to the one chosen.
MOST_COMPARED = 16

SIGNATURE = "void(f8[::1], f8[::1], i8, i8, i2[::1], i8[::1])"
Kernel = Callable[..., None]


@functools.cache
def unrolled_kernel(num_domains: int, keep: bool) -> Kernel:
    """A compiled kernel for one number of domains, from 2 to ``MOST_UNROLLED``.

    The numbers it closes over are constants to the compiler, so that every loop within the
    outermost is unrolled or made of vector instructions. It takes 0.3 s to compile, once for each
    number of domains.

    Returns:
        A function of weights [num_domains], counts [num_domains * lanes] (those of one domain in
        all lanes after another; brought up to the stretches' ends), the first sample, the length
        of a stretch, and the two outputs [lanes * length].
    """
    lanes, tile = LANES if keep else COUNTING_LANES, TILE
    half = (num_domains + 1) // 2
    compare = num_domains <= MOST_COMPARED

    @njit(SIGNATURE, cache=True, nogil=True)
    def run(
        weights: NDArray[np.float64],
        counts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        origins = np.empty(lanes, np.float64)
        for lane in range(lanes):
            origins[lane] = first + lane * length
        domains, numbers = np.empty(tile * lanes, np.int16), np.empty(tile * lanes, np.int64)
        for start in range(0, length, tile):
            for step in range(tile):
                row = step * lanes
                for lane in range(lanes):
                    position = origins[lane] + float(start + step)
                    # Not max(), which keeps LLVM from making vector instructions of the loop.
                    position = position if position > 1.0 else 1.0
                    # Two chains of comparisons, which do not wait for each other.
                    error, domain = weights[0] * position - counts[lane], 0.0
                    for i in range(1, half):
                        own = weights[i] * position - counts[i * lanes + lane]
                        domain = float(i) if own > error else domain
                        error = own if own > error else error
                    late_error = weights[half] * position - counts[half * lanes + lane]
                    late_domain = float(half)
                    for i in range(half + 1, num_domains):
                        own = weights[i] * position - counts[i * lanes + lane]
                        late_domain = float(i) if own > late_error else late_domain
                        late_error = own if own > late_error else late_error
                    domain = late_domain if late_error > error else domain
                    if keep or not compare:
                        domains[row + lane] = np.int16(domain)
                    if compare:
                        number = 0.0
                        for i in range(num_domains):
                            count = counts[i * lanes + lane]
                            number = count if domain == float(i) else number
                            counts[i * lanes + lane] = count + (1.0 if domain == float(i) else 0.0)
                        if keep:
                            numbers[row + lane] = np.int64(number)
                if not compare:
                    _count(domains, numbers, counts, lanes, row)
            if keep:
                _write(
                    domains,
                    numbers,
                    start,
                    length,
                    lanes,
                    tile,
                    dataset_index,
                    dataset_sample_index,
                )

    return run


@functools.cache
def block_kernel(keep: bool) -> Kernel:
    """As :func:`unrolled_kernel`, for any number of domains that is a multiple of ``BLOCK``."""
    lanes, tile, block = BLOCK_LANES, TILE, BLOCK
    half = block // 2

    @njit(SIGNATURE, cache=True, nogil=True)
    def run(
        weights: NDArray[np.float64],
        counts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        # Origins, positions, largest errors and their domains; parts of one array, so that the
        # compiler knows that they do not overlap.
        work = np.empty(4 * lanes, np.float64)
        for lane in range(lanes):
            work[lane] = first + lane * length
        domains, numbers = np.empty(tile * lanes, np.int16), np.empty(tile * lanes, np.int64)
        for start in range(0, length, tile):
            for step in range(tile):
                for lane in range(lanes):
                    position = work[lane] + float(start + step)
                    work[lanes + lane] = position if position > 1.0 else 1.0
                    work[2 * lanes + lane] = -np.inf
                    work[3 * lanes + lane] = 0.0
                for above in range(0, weights.size, block):
                    w = weights[above : above + block]
                    c = counts[above * lanes : (above + block) * lanes]
                    for lane in range(lanes):
                        position = work[lanes + lane]
                        error, domain = work[2 * lanes + lane], work[3 * lanes + lane]
                        for i in range(half):
                            own = w[i] * position - c[i * lanes + lane]
                            domain = float(above + i) if own > error else domain
                            error = own if own > error else error
                        late_error, late_domain = -np.inf, 0.0
                        for i in range(half, block):
                            own = w[i] * position - c[i * lanes + lane]
                            late_domain = float(above + i) if own > late_error else late_domain
                            late_error = own if own > late_error else late_error
                        work[2 * lanes + lane] = late_error if late_error > error else error
                        work[3 * lanes + lane] = late_domain if late_error > error else domain
                for lane in range(lanes):
                    domains[step * lanes + lane] = np.int16(work[3 * lanes + lane])
                _count(domains, numbers, counts, lanes, step * lanes)
            if keep:
                _write(
                    domains,
                    numbers,
                    start,
                    length,
                    lanes,
                    tile,
                    dataset_index,
                    dataset_sample_index,
                )

    return run


@njit(inline="always")
def _count(
    domains: NDArray[np.int16],
    numbers: NDArray[np.int64],
    counts: NDArray[np.float64],
    lanes: int,
    row: int,
) -> None:
    """Give every lane's domain the sample; its number goes to ``numbers``."""
    for lane in range(lanes):
        place = np.uint64(np.int64(domains[row + lane]) * lanes + lane)
        count = counts[place]
        numbers[row + lane] = np.int64(count)
        counts[place] = count + 1.0


@njit(inline="always")
def _write(
    domains: NDArray[np.int16],
    numbers: NDArray[np.int64],
    start: int,
    length: int,
    lanes: int,
    tile: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> None:
    """Write a tile [tile, lanes] to the stretches that are ``length`` apart."""
    for step in range(tile):
        for lane in range(lanes):
            # Unsigned, which spares the test for a position counted from the end.
            sample = np.uint64(start + step + lane * length)
            dataset_index[sample] = domains[step * lanes + lane]
            dataset_sample_index[sample] = numbers[step * lanes + lane]
