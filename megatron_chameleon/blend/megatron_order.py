"""Megatron's blended index: bit-identical to megatron-core's compiled helper, and faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core.datasets.utils import normalize
from numba import njit
from numpy.typing import ArrayLike, NDArray

MAX_DOMAINS = int(np.iinfo(np.int16).max)
"""Domain numbers are int16, as in Megatron's blended index."""
# Number of ranges of samples that are filled concurrently, one in each vector lane.
LANES = 16
# Samples between two selections of candidates; a lane's range is a multiple of this number.
WINDOW = 64
# Samples before a lane's range in which guessed counts usually converge to the actual counts.
WARM_UP = 16 * WINDOW
# Limits on the length of a lane's range; a longer range is inexact more often. Both are odd
# multiples of WINDOW, so that lanes do not compete for the same cache sets.
SHORTEST, LONGEST = 33 * WINDOW, 257 * WINDOW
# If fewer lanes than this are exact, the next samples are filled by one lane, sample by sample.
FEWEST_EXACT = 3
# Candidates are scanned in blocks, which LLVM vectorizes.
BLOCK = 8

# Samples between two stored rows of counts.
COUNTED = 1 << 18

BlendedIndex = tuple[NDArray[np.int16], NDArray[np.int64]]


class MegatronOrder:
    """The index of Megatron's BlendedDataset for a whole run, 10 bytes per sample.

    Args:
        weights: [num_domains], not negative.
        num_samples: number of samples in the index.
        by_size: whether the weights are data set sizes, which Megatron uses if no weights are
            passed. Megatron then normalizes them once instead of twice.

    Attributes:
        shares: [num_domains] the weights, scaled once to sum to 1.
    """

    BYTES_PER_SAMPLE = 10

    def __init__(self, weights: Sequence[float], num_samples: int, by_size: bool = False) -> None:
        # Domains of weight 0 are left out, since they would win ties; so are domains whose weight
        # becomes 0 when scaled in float64.
        positive = np.flatnonzero(weights)
        scaled = np.zeros(len(weights))
        scaled[positive] = normalize(np.asarray(weights, np.float64)[positive].tolist())
        self.shares: list[float] = scaled.tolist()
        self._domains = np.flatnonzero(scaled)
        # Megatron normalizes the weights of --data-path twice. The second time can change the last
        # bit, which decides ties.
        sampled = scaled[self._domains].tolist()
        self._index, self._numbers = build_blending_indices(
            sampled if by_size else normalize(sampled), num_samples
        )
        blocks = range(0, num_samples - num_samples % COUNTED, COUNTED)
        rows = [self._counted(block, block + COUNTED) for block in blocks]
        self._counts = np.cumsum([np.zeros(len(weights), np.int64), *rows], axis=0)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the domain of each sample (in any order) and its index within it; both [n]."""
        return self._domains[self._index[samples]], self._numbers[samples]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Count each domain's samples among the first ``samples``, [num_domains]."""
        block = samples // COUNTED
        counts: NDArray[np.int64] = self._counts[block] + self._counted(block * COUNTED, samples)
        return counts

    def _counted(self, first: int, stop: int) -> NDArray[np.int64]:
        counts = np.zeros(len(self.shares), np.int64)
        found = np.bincount(self._index[first:stop], minlength=len(self._domains))
        counts[self._domains] = found
        return counts


def build_blending_indices(
    weights: ArrayLike, num_samples: int, out: BlendedIndex | None = None
) -> BlendedIndex:
    """Megatron's greedy blend, bit-identical to ``helpers.build_blending_indices``.

    Sample n goes to the domain i with the largest error ``weights[i] * max(n, 1) - count[i]``,
    where count[i] is the number of its samples before n; ties go to the lowest i. All arithmetic is
    in float64, since rounding decides near-ties. A weight of 0 can win such a tie: leave out
    domains that must not be sampled.

    Args:
        weights: [num_domains] float64, usually summing to 1.
        num_samples: length of the index.
        out: arrays to write into, of the shapes and types returned.

    Returns:
        dataset_index [num_samples] int16, the domain of each sample, and
        dataset_sample_index [num_samples] int64, its number within that domain.

    Raises:
        ValueError: if there are no weights or more than 32,767, a weight is not finite, the number
            of samples is negative, or the ``out`` arrays do not fit.
    """
    # Adding 0.0 turns -0.0 into 0.0.
    array = np.ascontiguousarray(weights, dtype=np.float64) + 0.0
    if array.ndim != 1 or not 1 <= array.size <= MAX_DOMAINS:
        raise ValueError(
            f"weights of shape {array.shape}: a blend needs 1 to {MAX_DOMAINS} domains"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"weight {np.flatnonzero(~np.isfinite(array))[0]} is not finite")
    if num_samples < 0:
        raise ValueError(f"num_samples is {num_samples}; it cannot be negative")
    if out is None:
        out = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    _check_output(out[0], np.int16, num_samples)
    _check_output(out[1], np.int64, num_samples)
    _fill(array, *out)
    return out


def _check_output(array: NDArray[Any], dtype: type, num_samples: int) -> None:
    if array.shape != (num_samples,) or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"out holds {array.dtype} of shape {array.shape}; contiguous {dtype.__name__} of shape "
            f"({num_samples},) is needed"
        )


# Errors are rounded twice, after the product and after the difference, and rounding decides
# near-ties: do not compile with fastmath or fused multiply-add.
@njit(cache=True, nogil=True)
def _fill(
    weights: NDArray[np.float64], index: NDArray[np.int16], numbers: NDArray[np.int64]
) -> None:
    """Write the whole index.

    To choose the domain of a sample, the greedy rule needs the counts before that sample. Each lane
    starts ``WARM_UP`` samples before its range from guessed counts, since the rule soon makes the
    same choices whatever the counts it starts from. A lane is accepted only if its counts after
    warming up equal those at the end of the lane before it, so the result is exact even if guesses
    are wrong.
    """
    counts = np.zeros(weights.size)
    ends, joins = np.empty((LANES, weights.size)), np.empty((LANES, weights.size))
    first, longest, pause = 0, SHORTEST, 1
    while first < index.size:
        length = min((index.size - first - WARM_UP) // LANES, longest) // WINDOW * WINDOW
        if length < WARM_UP:
            _fill_one_by_one(weights, counts, first, index.size, index, numbers)
            return
        ends[0] = counts
        for lane in range(1, LANES):
            _guess(weights, counts, first + lane * length, ends[lane])
        _fill_lanes(weights, ends, joins, first, length, index, numbers)
        exact = 1
        while exact < LANES and np.array_equal(joins[exact], ends[exact - 1]):
            exact += 1
        counts[:] = ends[exact - 1]
        first += exact * length + WARM_UP
        longest = min(2 * longest - WINDOW, LONGEST) if exact == LANES else SHORTEST
        if exact < FEWEST_EXACT:
            stop = min(first + pause * length, index.size)
            _fill_one_by_one(weights, counts, first, stop, index, numbers)
            first, pause = stop, min(2 * pause, 64)
        else:
            pause = 1


@njit(cache=True, nogil=True)
def _fill_one_by_one(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    first: int,
    stop: int,
    index: NDArray[np.int16],
    numbers: NDArray[np.int64],
) -> float:
    """Apply the greedy rule from ``first`` to ``stop``, and update ``counts`` accordingly.

    Returns:
        The lowest error at which a domain was chosen.
    """
    lowest = np.inf
    for sample in range(first, stop):
        position = float(max(sample, 1))
        chosen, largest = 0, weights[0] * position - counts[0]
        for domain in range(1, weights.size):
            error = weights[domain] * position - counts[domain]
            if error > largest:
                chosen, largest = domain, error
        index[sample], numbers[sample] = chosen, np.int64(counts[chosen])
        counts[chosen] += 1.0
        lowest = min(lowest, largest)
    return lowest


@njit(cache=True, nogil=True)
def _guess(
    weights: NDArray[np.float64],
    known: NDArray[np.float64],
    sample: int,
    counts: NDArray[np.float64],
) -> None:
    """Estimate the ``counts`` before ``sample`` from the ``known`` counts before an earlier sample.

    Errors rise to about the same maximum before a domain is chosen: search for the maximum at which
    the counts sum to the number of samples.
    """
    low, high = -1.0, 2.0
    for _ in range(24):
        top = 0.5 * (low + high)
        total = 0.0
        for domain in range(weights.size):
            total += max(np.ceil(weights[domain] * sample - top), known[domain])
        if total > sample:
            low = top
        else:
            high = top
    missing = float(sample)
    for domain in range(weights.size):
        counts[domain] = max(np.ceil(weights[domain] * sample - high), known[domain])
        missing -= counts[domain]
    # Assign the remainder to heavy domains, which correct it soonest.
    heaviest = np.argmax(weights)
    counts[heaviest] += missing


@njit(cache=True, nogil=True)
def _fill_lanes(
    weights: NDArray[np.float64],
    counts: NDArray[np.float64],
    joins: NDArray[np.float64],
    first: int,
    length: int,
    index: NDArray[np.int16],
    numbers: NDArray[np.int64],
) -> None:
    """Apply the greedy rule in every lane to ``WARM_UP + length`` samples.

    Lane l starts at ``first + l * length``, so that the end of the previous lane overwrites the
    samples that it writes while warming up. In each window a lane compares only candidates: domains
    whose error reaches a floor within the window. As long as the largest error of the candidates is
    not below the floor, it is the largest of all domains; otherwise the window is filled again,
    sample by sample.

    Args:
        weights: [num_domains] float64.
        counts: [LANES, num_domains] float64, updated to the end of each lane.
        joins: [LANES, num_domains] float64, receives the counts after warming up.
        first: first sample of the first lane.
        length: samples in a lane's range, a multiple of the window.
        index: receives the domain of each sample of the run.
        numbers: receives each sample's number within its domain.
    """
    num_domains = weights.size
    room = (num_domains + BLOCK) * LANES
    candidates = np.zeros(room, np.int16)
    own_weights, own_counts = np.zeros(room), np.full(room, np.inf)
    # Positions, largest errors and their places, in one array so that the compiler knows that they
    # do not overlap.
    work = np.empty(3 * LANES)
    floors, lowest = np.full(LANES, -np.inf), np.empty(LANES)
    sizes = np.zeros(LANES, np.int64)
    slack = min(1.0, 16.0 / num_domains)
    for start in range(0, WARM_UP + length, WINDOW):
        if start == WARM_UP:
            joins[:] = counts
        size = 0
        for lane in range(LANES):
            begin = float(max(first + lane * length + start, 1))
            end = begin + float(WINDOW)
            place = lane
            for domain in range(num_domains):
                weight, count = weights[domain], counts[lane, domain]
                own_weights[place], own_counts[place] = weight, count
                candidates[place] = domain
                error = weight * (end if weight > 0.0 else begin) - count
                place += LANES if error >= floors[lane] else 0
            sizes[lane] = place // LANES
            size = max(size, sizes[lane])
            lowest[lane] = np.inf
        size = (size + BLOCK - 1) // BLOCK * BLOCK
        for lane in range(LANES):
            for i in range(sizes[lane], size):
                own_weights[i * LANES + lane], own_counts[i * LANES + lane] = 0.0, np.inf
        for step in range(start, start + WINDOW):
            for lane in range(LANES):
                position = float(first + step + lane * length)
                work[lane] = position if position > 1.0 else 1.0
                work[LANES + lane], work[2 * LANES + lane] = -np.inf, 0.0
            for i in range(0, size, BLOCK):
                part = slice(i * LANES, (i + BLOCK) * LANES)
                _look(own_weights[part], own_counts[part], i, work)
            for lane in range(LANES):
                # Use unsigned indices, since numba would test whether signed indices are negative.
                chosen = np.uint64(np.int64(work[2 * LANES + lane]) * LANES + lane)
                count = own_counts[chosen]
                own_counts[chosen] = count + 1.0
                sample = np.uint64(first + lane * length + step)
                index[sample], numbers[sample] = candidates[chosen], np.int64(count)
                lowest[lane] = min(lowest[lane], work[LANES + lane])
        for lane in range(LANES):
            if lowest[lane] >= floors[lane]:
                for i in range(sizes[lane]):
                    counts[lane, candidates[i * LANES + lane]] = own_counts[i * LANES + lane]
            else:
                begin_again = first + lane * length + start
                lowest[lane] = _fill_one_by_one(
                    weights, counts[lane], begin_again, begin_again + WINDOW, index, numbers
                )
            floors[lane] = lowest[lane] - slack


@njit(inline="always")
def _look(
    weights: NDArray[np.float64], counts: NDArray[np.float64], first: int, work: NDArray[np.float64]
) -> None:
    """Find a larger error in the block of candidates that starts at ``first``."""
    for lane in range(LANES):
        position = work[lane]
        error, place = work[LANES + lane], work[2 * LANES + lane]
        for i in range(BLOCK):
            own = weights[i * LANES + lane] * position - counts[i * LANES + lane]
            place = float(first + i) if own > error else place
            error = own if own > error else error
        work[LANES + lane], work[2 * LANES + lane] = error, place
