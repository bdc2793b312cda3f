"""The greedy rule for hundreds of domains, of which only those near the front are looked at.

The errors of most domains are far below the largest one, and it is known when a domain's error will
come up to some floor: it grows by the domain's weight with every sample. So domains wait in a
calendar, by the slot of a few samples in which they may come to the floor, and only those which
have are in the front, where the largest error is looked for. As long as that is not below the
floor, it is the largest of all; where it is, the floor is lowered.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.blend.greedy import LEARNING

# Samples in a slot of the calendar, and slots until it is written anew.
SLOT = 8
SLOTS = 256
# The front is looked through by so many places at once.
VECTOR = 8

# How far the floor is below the lowest of the largest errors in the window before.
LEAST_SLACK, FIRST_SLACK, MOST_SLACK = 1e-3, 0.01, 0.5
# Lighter domains, and those of negative weight, are always in the front.
LEAST_WEIGHT = 1e-290
# Beyond, errors might overflow.
MOST_WEIGHT = 1e6

LEAST, ALL_BUT_SIGN = -(2**63), 2**63 - 1

# After every domain.
NOBODY = 2**62
# Who comes after the last one in a slot.
END = -1


@njit(cache=True, nogil=True)
def fill(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    first: int,
    stop: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    tops: NDArray[np.float64],
) -> None:
    """As ``greedy.fill``, for weights up to ``MOST_WEIGHT``; the arguments are the same."""
    # Samples in which the error of a domain grows by 1.
    periods = np.zeros(weights.size, np.float64)
    for domain in range(weights.size):
        if weights[domain] > LEAST_WEIGHT:
            periods[domain] = 1.0 / weights[domain]
    slack = FIRST_SLACK
    floor = _largest_error(weights, counts, first)[1] - slack
    start = first
    while start < stop:
        end = min(start + SLOT * SLOTS, stop)
        part = slice(start - first, end - first)
        outputs = dataset_index[part], dataset_sample_index[part]
        reached, lowest = _fill_window(
            weights, periods, counts, start, end, floor, outputs[0], outputs[1], tops
        )
        if reached < end:
            # Nobody in the front is above the floor.
            domain, lowest = _largest_error(weights, counts, reached)
            _give(counts, domain, outputs[0], outputs[1], reached - start)
            reached += 1
            slack = min(2.0 * slack, MOST_SLACK)
        else:
            slack = max(0.95 * slack, LEAST_SLACK)
        floor = lowest - slack
        start = reached


# One function, long as it is: at a call, and where one is inlined, numba counts references to the
# arrays that are passed. With the search and the giving taken out it takes twice as long.
@njit(cache=True, nogil=True)
def _fill_window(
    weights: NDArray[np.float64],
    periods: NDArray[np.float64],
    counts: NDArray[np.float64],
    start: int,
    end: int,
    floor: float,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    tops: NDArray[np.float64],
) -> tuple[int, float]:
    """Fill up to ``end``, or to where the largest error is below ``floor``.

    Returns:
        The sample after the last one filled, and the lowest of the largest errors.
    """
    keep, learn = dataset_index.size > 0, tops.size > 0
    # The front, in no order. Empty places have infinite counts, which makes their errors the least.
    room = weights.size + VECTOR
    domains = np.full(room, NOBODY)
    front_weights, front_counts = np.zeros(room, np.float64), np.empty(room, np.float64)
    errors = np.empty(room, np.float64)
    bits = errors.view(np.int64)
    places, empty = np.empty(weights.size, np.int64), np.empty(room, np.int64)
    size, num_empty = 0, 0
    heads, following = _calendar(periods, counts, start, floor)
    lowest = np.inf
    for slot in range(SLOTS):
        # Who is due enters the front.
        domain = heads[slot]
        while domain != END:
            if num_empty > 0:
                num_empty -= 1
                place = empty[num_empty]
            else:
                place = size
                size += 1
                if place % VECTOR == 0:
                    front_counts[place : place + VECTOR] = np.inf
            domains[place], places[domain] = domain, place
            front_weights[place], front_counts[place] = weights[domain], counts[domain]
            domain = following[domain]
        whole = (size + VECTOR - 1) // VECTOR * VECTOR
        slot_end = start + (slot + 1) * SLOT
        for sample in range(slot_end - SLOT, min(slot_end, end)):
            position = float(max(sample, 1))
            for i in range(whole):
                errors[i] = front_weights[i] * position - front_counts[i]
            # Of whole numbers, unlike of floating-point ones, a loop for the largest is made of
            # vector instructions. Turned over where negative, the bits are ordered as the numbers.
            largest = LEAST
            for i in range(whole):
                largest = max(largest, bits[i] ^ ((bits[i] >> 63) & ALL_BUT_SIGN))
            largest ^= (largest >> 63) & ALL_BUT_SIGN
            # The lowest of the domains that have it.
            domain = NOBODY
            for i in range(whole):
                domain = min(domain, domains[i] if bits[i] == largest else NOBODY)
            if domain == NOBODY or errors[places[domain]] < floor:
                return sample, lowest
            place = places[domain]
            error = errors[place]
            lowest = min(lowest, error)
            if learn:
                known = tops[domain] if tops[domain] == tops[domain] else error
                tops[domain] = known + LEARNING * (error - known)
            if keep:
                dataset_index[sample - start] = domain
                dataset_sample_index[sample - start] = np.int64(counts[domain])
            counts[domain] += 1.0
            due = _slot_of(counts[domain], floor, periods[domain], start)
            if due <= slot:
                front_counts[place] = counts[domain]
                continue
            front_counts[place] = np.inf
            empty[num_empty] = place
            num_empty += 1
            if due < SLOTS:
                following[domain], heads[due] = heads[due], domain
        if slot_end >= end:
            break
    return end, lowest


@njit(cache=True, nogil=True)
def _calendar(
    periods: NDArray[np.float64], counts: NDArray[np.float64], start: int, floor: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Who is first in each slot [SLOTS], and who follows whom [num_domains]."""
    heads, following = np.full(SLOTS, END), np.empty(counts.size, np.int64)
    for domain in range(counts.size):
        slot = _slot_of(counts[domain], floor, periods[domain], start)
        if slot < SLOTS:
            following[domain], heads[slot] = heads[slot], domain
    return heads, following


@njit(cache=True, nogil=True)
def _slot_of(count: float, floor: float, period: float, start: int) -> int:
    """In which slot the error of a domain may come to the floor; from ``SLOTS`` on, in none."""
    # Two samples early is more than what rounding might make it late.
    samples = (count + floor) * period - 2.0 - start
    if samples >= SLOT * SLOTS:
        return SLOTS
    return int(max(samples, 0.0)) // SLOT


@njit(cache=True, nogil=True)
def _give(
    counts: NDArray[np.float64],
    domain: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    place: int,
) -> None:
    """Give ``domain`` a sample."""
    if dataset_index.size > 0:
        dataset_index[place] = domain
        dataset_sample_index[place] = np.int64(counts[domain])
    counts[domain] += 1.0


@njit(cache=True, nogil=True)
def _largest_error(
    weights: NDArray[np.float64], counts: NDArray[np.float64], sample: int
) -> tuple[int, float]:
    """The domain of the largest of all errors, the lowest of several, and the error."""
    position = float(max(sample, 1))
    chosen, largest = 0, -np.inf
    for domain in range(weights.size):
        error = weights[domain] * position - counts[domain]
        if error > largest:
            chosen, largest = domain, error
    return chosen, largest
