"""The rule by which a blend chooses its domains, one sample after another.

Sample n goes to the domain i with the largest error ``weights[i] * max(n, 1) - counts[i]``, where
counts[i] is how many of the samples before n it has had; ties go to the lowest i. The counts before
a sample are the whole state, so that the rule can be followed from any sample whose counts are
known. They are float64, which spares a conversion and is exact up to 2**53.

Errors are rounded twice, after the product and after the difference, and rounding decides
near-ties: neither fastmath nor fused multiply-add may be used on them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Share of the average weight below which a domain is rare.
RARE = 0.1
# By how much the error of a domain that should have been chosen is likely to grow until it is.
OVERDUE = 0.03
# Share of what is seen in what is remembered.
LEARNING = 0.25

NO_TOPS = np.empty(0, np.float64)
"""Where it is not to be learned at which errors domains are chosen."""


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
    """Follow the rule from sample ``first`` to ``stop``.

    Args:
        weights: [num_domains] float64.
        counts: [num_domains] float64, before ``first``; they are brought up to ``stop``.
        first: first sample.
        stop: the one after the last.
        dataset_index: [stop - first] int16, written; or empty.
        dataset_sample_index: [stop - first] int64, written; or empty.
        tops: [num_domains] float64, the error at which each domain is chosen, which is averaged
            over the last few times; NaN where it has not been seen. Or empty.
    """
    for sample in range(first, stop):
        domain = _choose(weights, counts, sample)
        if tops.size > 0:
            top = weights[domain] * sample - counts[domain]
            known = tops[domain] if tops[domain] == tops[domain] else top
            tops[domain] = known + LEARNING * (top - known)
        if dataset_index.size > 0:
            dataset_index[sample - first] = domain
            dataset_sample_index[sample - first] = np.int64(counts[domain])
        counts[domain] += 1.0


@njit(cache=True, nogil=True)
def follow(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    guessed: NDArray[np.float64],
    first: int,
    stop: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> int:
    """:func:`fill` from ``counts`` until it comes to where the rule leads from ``guessed``, too.

    From then on both lead to the same choices, so that what was filled from ``guessed`` is right.

    Args:
        weights: [num_domains] float64.
        counts: [num_domains] float64, before ``first``; brought up to where they
            agree, or to ``stop``.
        guessed: [num_domains] float64, the same.
        first: first sample.
        stop: the one after the last.
        dataset_index: [stop - first] int16, mended up to where they agree; or empty.
        dataset_sample_index: [stop - first] int64, the same.

    Returns:
        How many samples it took; ``stop - first + 1`` where they never agree.
    """
    differing = 0
    for domain in range(weights.size):
        differing += int(counts[domain] != guessed[domain])
    sample = first
    while differing > 0:
        if sample == stop:
            return stop - first + 1
        domain = _choose(weights, counts, sample)
        other = _choose(weights, guessed, sample)
        if dataset_index.size > 0:
            dataset_index[sample - first] = domain
            dataset_sample_index[sample - first] = np.int64(counts[domain])
        differing += _step(counts, guessed, domain) + _step(guessed, counts, other)
        sample += 1
    return sample - first


@njit(cache=True, nogil=True)
def read(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    first: int,
    samples: NDArray[np.int64],
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> None:
    """Follow the rule from sample ``first`` on and tell what it gives at some samples.

    Args:
        weights: [num_domains] float64.
        counts: [num_domains] float64, before ``first``; brought up to the last of ``samples``.
        first: first sample.
        samples: [n], ascending, none before ``first``.
        dataset_index: [n] int16, written.
        dataset_sample_index: [n] int64, written.
    """
    domain = _choose(weights, counts, first)
    sample = first
    for i in range(samples.size):
        while sample < samples[i]:
            counts[domain] += 1.0
            sample += 1
            domain = _choose(weights, counts, sample)
        dataset_index[i] = domain
        dataset_sample_index[i] = np.int64(counts[domain])


@njit(cache=True, nogil=True)
def guess_starts(
    weights: NDArray[np.float64],
    tops: NDArray[np.float64],
    counts: NDArray[np.float64],
    first: int,
    length: int,
    starts: NDArray[np.float64],
) -> None:
    """Write the counts that the rule is likely to have reached before each of some stretches.

    Args:
        weights: [num_domains] float64.
        tops: [num_domains] float64, about where each domain's error turns; NaN where unknown.
        counts: [num_domains] float64, before ``first``.
        first: first sample of the first stretch.
        length: samples in a stretch.
        starts: [stretches, num_domains] float64, written; the first row is exact.
    """
    expected = _known(tops)
    for domain in range(weights.size):
        # One that should have been chosen by now is not going to be at once.
        now = weights[domain] * first - counts[domain]
        expected[domain] = max(expected[domain], now + OVERDUE)
    starts[0] = counts
    shift = 0.0
    for lane in range(1, starts.shape[0]):
        shift = _guess(weights, expected, first + lane * length, shift, starts[lane])


@njit(cache=True, nogil=True)
def guess_one(
    weights: NDArray[np.float64],
    tops: NDArray[np.float64],
    sample: int,
    counts: NDArray[np.float64],
) -> None:
    """Write to ``counts`` [num_domains] those that the rule is likely to have before ``sample``."""
    _guess(weights, _known(tops), sample, 0.0, counts)


@njit(cache=True, nogil=True)
def _known(tops: NDArray[np.float64]) -> NDArray[np.float64]:
    """``tops`` with a guess for those unknown.

    Where a domain has not been chosen yet, it is because it is rare, and its top is low.
    """
    lowest = np.nanmin(tops)
    known = np.empty(tops.size, np.float64)
    for domain in range(tops.size):
        known[domain] = tops[domain] if tops[domain] == tops[domain] else lowest
    return known


@njit(cache=True, nogil=True)
def learn_tops(
    weights: NDArray[np.float64],
    tops: NDArray[np.float64],
    starts: NDArray[np.float64],
    first: int,
    length: int,
) -> None:
    """Correct ``tops`` by the exact counts before some stretches [stretches, num_domains].

    A top is not below any error, and not more than 1 above any.
    """
    for domain in range(weights.size):
        highest, lowest = -np.inf, np.inf
        for lane in range(starts.shape[0]):
            error = weights[domain] * (first + lane * length) - starts[lane, domain]
            highest, lowest = max(highest, error), min(lowest, error)
        if highest > lowest + 1.0:
            tops[domain] = 0.5 * (highest + lowest + 1.0)
        elif tops[domain] == tops[domain]:
            tops[domain] = min(max(tops[domain], highest), lowest + 1.0)
        elif lowest < 0.0:
            tops[domain] = lowest + 1.0


@njit(cache=True, nogil=True)
def join(
    weights: NDArray[np.float64],
    most_followed: int,
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    first: int,
    length: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> int:
    """Make every stretch go on from the end of the one before it, as far as that is done soon.

    Args:
        weights: [num_domains] float64.
        most_followed: samples for which a wrong guess is followed until it agrees.
        starts: [lanes, num_domains] float64, the counts each stretch was filled from; corrected.
        ends: [lanes, num_domains] float64, the counts it came to.
        first: first sample of the first stretch.
        length: samples in a stretch.
        dataset_index: [lanes * length] int16, mended; or empty.
        dataset_sample_index: [lanes * length] int64, mended; or empty.

    Returns:
        How many stretches are exact now.
    """
    for lane in range(1, starts.shape[0]):
        guessed = starts[lane].copy()
        starts[lane] = ends[lane - 1]
        counts = ends[lane - 1].copy()
        start = first + lane * length
        stop = start + min(length, most_followed)
        part = slice(lane * length, (lane + 1) * length)
        outputs = dataset_index[part], dataset_sample_index[part]
        if follow(weights, counts, guessed, start, stop, *outputs) > stop - start:
            return lane
    return starts.shape[0]


@njit(cache=True, nogil=True)
def _guess(
    weights: NDArray[np.float64],
    tops: NDArray[np.float64],
    sample: int,
    shift: float,
    counts: NDArray[np.float64],
) -> float:
    """Counts that the rule is likely to have reached before ``sample``.

    A domain's error grows with the samples until it is the largest, and falls by 1 when the domain
    is chosen. So it stays within 1 below some top: here ``tops``, those of all but rare domains
    shifted by the number by which as many samples are given out as there are before ``sample``.

    Args:
        weights: [num_domains] float64.
        tops: [num_domains] float64, about where each domain's error turns.
        sample: not negative.
        shift: where to start looking: that of a sample nearby, or 0.
        counts: [num_domains] float64, written; they sum to ``sample``.

    Returns:
        The shift.
    """
    rare = RARE * float(np.mean(weights))
    if _given_out(weights, tops, sample, np.inf, rare) > sample:
        # The rare ones alone would have more than all: whatever their tops are, they are wrong.
        rare = 0.0
    below = above = 0.0625
    while _given_out(weights, tops, sample, shift - below, rare) < sample:
        below *= 4.0
    while _given_out(weights, tops, sample, shift + above, rare) > sample:
        above *= 4.0
    low, high = shift - below, shift + above
    for _ in range(52):
        middle = 0.5 * (low + high)
        given_out = _given_out(weights, tops, sample, middle, rare)
        if given_out > sample:
            low = middle
        else:
            high = middle
        if given_out == sample:
            break
    missing = float(sample)
    for domain in range(weights.size):
        top = _shifted(tops[domain], weights[domain], high, rare)
        counts[domain] = max(np.ceil(weights[domain] * sample - top), 0.0)
        missing -= counts[domain]
    while missing > 0.0:
        counts[_choose(weights, counts, sample)] += 1.0
        missing -= 1.0
    return high


@njit(cache=True, nogil=True)
def _given_out(
    weights: NDArray[np.float64],
    tops: NDArray[np.float64],
    sample: int,
    shift: float,
    rare: float,
) -> float:
    """Samples given out before ``sample`` if every error is within 1 below its shifted top."""
    total = 0.0
    for domain in range(weights.size):
        top = _shifted(tops[domain], weights[domain], shift, rare)
        total += max(np.ceil(weights[domain] * sample - top), 0.0)
    return total


@njit(cache=True, nogil=True)
def _shifted(top: float, weight: float, shift: float, rare: float) -> float:
    # The largest error goes up and down; a rare domain waits for it to be down. The heaviest domain
    # is never rare, so that there is something to shift.
    return top if 0.0 <= weight < rare else top + shift


@njit(cache=True, nogil=True)
def _step(counts: NDArray[np.float64], others: NDArray[np.float64], domain: int) -> int:
    """Give ``domain`` a sample; the change in how many domains the two counts differ."""
    before = int(counts[domain] != others[domain])
    counts[domain] += 1.0
    return int(counts[domain] != others[domain]) - before


# It takes as few arrays as it can: numba counts the references to each that is passed.
@njit(cache=True, nogil=True)
def _choose(weights: NDArray[np.float64], counts: NDArray[np.float64], sample: int) -> int:
    """The domain of ``sample``."""
    position = float(max(sample, 1))
    chosen = 0
    largest = weights[0] * position - counts[0]
    for domain in range(1, weights.size):
        error = weights[domain] * position - counts[domain]
        if error > largest:
            largest = error
            chosen = domain
    return chosen
