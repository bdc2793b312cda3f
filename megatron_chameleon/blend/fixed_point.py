"""The greedy rule in fixed point, on as many stretches of samples as an int32 vector has lanes.

An int32 vector has twice the lanes of a float64 one, and adding to it takes less than multiplying
and rounding. Before each tile of samples, the rule's own errors are brought to fixed point. By how
much what they grow to may differ from the rule's errors is bounded; so where one is larger than all
others by more than that, the rule's is the largest as well. Where another comes close, as in a tie,
both domains are given the sample: then more is given out than there are samples, and the lane's
tile is filled anew by the rule itself.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.blend import greedy
from megatron_chameleon.blend.float_kernel import ARGUMENTS, Kernel
from megatron_chameleon.blend.tiles import TILE, finish_writing, write_tile
from megatron_chameleon.blend.vectors import (
    LANES,
    add,
    bits_of_both,
    bits_of_either,
    load,
    splat,
    store,
    store_int16,
    subtract,
    where_greater,
)

# An error of 1. Before a tile errors are from -WIDEST to WIDEST, which is from 0 to RANGE.
ONE, WIDEST, RANGE = 1 << 28, 2.0, 1 << 30
# Up to so many samples their numbers are int32.
MOST_SAMPLES = 2**31 - 1
# The more domains, the more often two are close, and the more of an error's bits are their number.
MOST_DOMAINS = 128


def suits(weights: NDArray[np.float64]) -> bool:
    """Whether errors by these weights [num_domains] stay in int32 and are told apart as a rule."""
    return bool(weights.size <= MOST_DOMAINS and weights.min() >= 0.0 and weights.max() <= 1.0)


@functools.cache
def fixed_point_kernel(keep: bool) -> Kernel:
    """As :func:`float_kernel`, for weights that it :func:`suits`, whatever their number.

    It goes to ``MOST_SAMPLES``, and returns how many tiles of a lane it had to fill anew.
    """

    @njit("i8" + ARGUMENTS, cache=True, nogil=True)
    def run(
        weights: NDArray[np.float64],
        counts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> int:
        num_domains = weights.size
        # Errors end in the number of their domain, which makes them different from each other.
        bits = 1
        while num_domains > 1 << bits:
            bits += 1
        growth = _growth(weights, bits)
        errors = np.empty(num_domains * LANES, np.int32)
        given = np.empty(num_domains * LANES, np.int32)
        seen, extra = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
        domains, numbers = np.empty(TILE * LANES, np.int16), np.empty(TILE * LANES, np.int32)
        # An error is off by less than 1 << bits when it is brought to fixed point, and by as much
        # by its growth; and those of the rule by 2**-53 of the sample, then and now.
        margin = splat(np.int32((4 << bits) + ((first + LANES * length) >> 23) + 4))
        domain_bits = splat(np.int32((1 << bits) - 1))
        anew = 0
        for start in range(0, length, TILE):
            _enter(weights, counts, first + start, length, bits, errors, given, extra)
            any_top = splat(np.int32(0))
            for step in range(TILE):
                row = step * num_domains
                top = _largest(errors, growth, row, num_domains)
                any_top = bits_of_either(any_top, top)
                number = _give(errors, given, growth, row, num_domains, subtract(top, margin))
                if keep:
                    store_int16(domains, step * LANES, bits_of_both(top, domain_bits))
                    store(numbers, step * LANES, number)
            store(seen, 0, any_top)
            _leave(counts, given, seen, extra)
            if keep:
                write_tile(domains, numbers, start, length, dataset_index, dataset_sample_index)
            outputs = dataset_index, dataset_sample_index
            anew += _fill_anew(weights, counts, extra, first, length, start, outputs)
        if keep:
            finish_writing()
        return anew

    return run


@njit(cache=True, nogil=True)
def _growth(weights: NDArray[np.float64], bits: int) -> NDArray[np.int32]:
    """By how much errors have grown at each sample of a tile [TILE * num_domains], modulo 2**32."""
    growth = np.empty(TILE * weights.size, np.int32)
    for step in range(TILE):
        for i in range(weights.size):
            grown = np.int64(weights[i] * step * ONE) >> bits << bits
            growth[step * weights.size + i] = np.int32(grown)
    return growth


@njit(cache=True, nogil=True)
def _enter(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    sample: int,
    length: int,
    bits: int,
    errors: NDArray[np.int32],
    given: NDArray[np.int32],
    extra: NDArray[np.int32],
) -> None:
    """Bring errors and counts before a tile, at ``sample`` in the first lane, to int32.

    ``extra`` [LANES] is set so that adding the counts after the tile makes it 0, or more where an
    error is too large or too small.
    """
    positions = np.empty(LANES, np.float64)
    for lane in range(LANES):
        positions[lane] = sample + lane * length
        # The rule takes sample 0 for sample 1, which is not how errors grow.
        extra[lane] = np.int32(positions[lane] < 1.0) - np.int32(TILE)
    for i in range(weights.size):
        weight, lowest_bits = weights[i], np.int32(i)
        for lane in range(LANES):
            place = np.uint64(i * LANES + lane)
            error = weight * positions[lane] - counts[place]
            clipped = error if error < WIDEST else WIDEST
            clipped = clipped if clipped > -WIDEST else -WIDEST
            fixed = np.int32((clipped + WIDEST) * ONE)
            errors[place] = np.int32(fixed >> bits << bits) | lowest_bits
            given[place] = np.int32(np.int64(counts[place]))
            extra[lane] += np.int32(abs(error) >= WIDEST) - given[place]


@njit(inline="always")
def _largest(errors: NDArray[np.int32], growth: NDArray[np.int32], row: int, size: int) -> Any:
    """The largest error in each lane, where they have grown by growth[row : row + size]."""
    top = add(load(errors, 0), splat(growth[row]))
    for i in range(1, size):
        error = add(load(errors, i * LANES), splat(growth[row + i]))
        top = where_greater(error, top, error, top)
    return top


@njit(inline="always")
def _give(
    errors: NDArray[np.int32],
    given: NDArray[np.int32],
    growth: NDArray[np.int32],
    row: int,
    size: int,
    bound: Any,
) -> Any:
    """Give the sample to the domains whose errors are above ``bound``; the number it has there."""
    number = splat(np.int32(0))
    one, once = splat(np.int32(ONE)), splat(np.int32(1))
    for i in range(size):
        before, count = load(errors, i * LANES), load(given, i * LANES)
        error = add(before, splat(growth[row + i]))
        number = where_greater(error, bound, count, number)
        store(errors, i * LANES, where_greater(error, bound, subtract(before, one), before))
        store(given, i * LANES, where_greater(error, bound, add(count, once), count))
    return number


@njit(cache=True, nogil=True)
def _leave(
    counts: NDArray[np.float64],
    given: NDArray[np.int32],
    seen: NDArray[np.int32],
    extra: NDArray[np.int32],
) -> None:
    """Take over the counts after a tile in the lanes that are right; elsewhere ``extra`` is not 0.

    ``seen`` [LANES] has the bits of all largest errors: none may have left the range they entered
    in, within which all of them are far from overflowing.
    """
    for start in range(0, given.size, LANES):
        for lane in range(LANES):
            extra[lane] += given[np.uint64(start + lane)]
    for lane in range(LANES):
        extra[lane] |= seen[lane] & np.int32(-RANGE)
    for start in range(0, given.size, LANES):
        for lane in range(LANES):
            place = np.uint64(start + lane)
            counts[place] = float(given[place]) if extra[lane] == 0 else counts[place]


@njit(cache=True, nogil=True)
def _fill_anew(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    extra: NDArray[np.int32],
    first: int,
    length: int,
    start: int,
    outputs: tuple[NDArray[np.int16], NDArray[np.int64]],
) -> int:
    """Fill the tile at ``start`` by the rule itself in the lanes that are not right; how many."""
    anew = 0
    for lane in range(LANES):
        if extra[lane] == 0:
            continue
        begin = lane * length + start
        index, sample_index = outputs[0][begin : begin + TILE], outputs[1][begin : begin + TILE]
        own = counts[lane::LANES].copy()
        samples = first + begin, first + begin + TILE
        no_tops = np.empty(0, np.float64)
        greedy.fill(weights, own, samples[0], samples[1], index, sample_index, no_tops)
        counts[lane::LANES] = own
        anew += 1
    return anew
