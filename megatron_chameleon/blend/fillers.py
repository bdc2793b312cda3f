"""The greedy rule by whichever kernel is fastest for it, on several threads.

A thread can start in the middle because the counts there can be guessed. Where the guess was wrong,
its samples are filled again from the right counts, until these come to the counts it had there:
from then on what it filled is right. So the result is exact on any number of threads.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.blend import calendar_queue, greedy
from megatron_chameleon.blend.lanes import FEWEST_IN_CALENDAR, LaneFiller
from megatron_chameleon.blend.threads import even_ranges, for_each
from megatron_chameleon.blend.tiles import TILE
from megatron_chameleon.blend.vectors import LANES

Outputs = tuple[NDArray[np.int16], NDArray[np.int64]]
NO_OUTPUTS: Outputs = (np.empty(0, np.int16), np.empty(0, np.int64))
"""Where only the counts are wanted."""

# Up to so many samples times domains, some 3 ms of work, the rule itself is done before another
# kernel is loaded.
FEW_ERRORS = 2_000_000
# From so many domains on, looking only at those near the front is faster than lanes.
MANY_DOMAINS = 512
# Samples from which it is learned at which errors domains are chosen: so many, and so many for each
# domain.
LEARNING_SAMPLES, LEARNING_TIMES = 16384, 64

# Parts are small enough that threads which are slowed down leave some to the others.
PARTS_PER_THREAD = 2
SMALLEST_PART = 1 << 18
# Samples filled again before it is looked whether that was enough; twice as many each time.
FIRST_PIECE = 1 << 14


class Filler:
    """:func:`greedy.fill` for one blend, by the kernel that suits it. For one thread.

    Args:
        weights: [num_domains] float64.
        num_samples: how many there are to fill.
        keep: whether choices are written, or only counted.
    """

    def __init__(self, weights: NDArray[np.float64], num_samples: int, keep: bool) -> None:
        self.weights, self.keep, self._num_samples = weights, keep, num_samples
        self.plain = (
            num_samples * weights.size <= FEW_ERRORS
            or weights.size == 1
            or np.abs(weights).max() > calendar_queue.MOST_WEIGHT
        )
        """Whether the rule itself is followed, sample by sample."""
        self.lanes: LaneFiller | None = None
        if not self.plain and weights.size <= MANY_DOMAINS:
            self.lanes = LaneFiller(weights, keep, self._tops.copy())

    @functools.cached_property
    def _tops(self) -> NDArray[np.float64]:
        """The errors at which domains are chosen [num_domains] float64."""
        tops, counts = np.full(self.weights.size, np.nan), np.zeros(self.weights.size)
        fill = greedy.fill if self.weights.size < FEWEST_IN_CALENDAR else calendar_queue.fill
        samples = max(LEARNING_SAMPLES, LEARNING_TIMES * self.weights.size)
        fill(self.weights, counts, 0, min(samples, self._num_samples), *NO_OUTPUTS, tops)
        return tops

    def for_another_thread(self) -> Filler:
        """One that shares nothing that changes."""
        other = copy.copy(self)
        if self.lanes is not None:
            other.lanes = LaneFiller(self.weights, self.keep, self._tops.copy())
        return other

    def fill(self, counts: NDArray[np.float64], first: int, stop: int, outputs: Outputs) -> None:
        """Follow the rule from sample ``first`` to ``stop``.

        Args:
            counts: [num_domains] float64, before ``first``; brought up to ``stop``.
            first: first sample.
            stop: the one after the last.
            outputs: dataset_index [stop - first] int16 and dataset_sample_index int64, written; or
                empty.
        """
        if self.plain:
            greedy.fill(self.weights, counts, first, stop, *outputs, greedy.NO_TOPS)
        elif self.lanes is not None:
            self.lanes.fill(counts, first, stop, *outputs)
        else:
            calendar_queue.fill(self.weights, counts, first, stop, *outputs, greedy.NO_TOPS)

    def advance(self, counts: NDArray[np.float64], first: int, stop: int) -> None:
        """:meth:`fill`, which only counts."""
        self.fill(counts, first, stop, NO_OUTPUTS)

    def guess(self, sample: int) -> NDArray[np.float64]:
        """Counts [num_domains] that are likely before ``sample``; exact before the first one."""
        counts = np.zeros(self.weights.size)
        if sample > 0:
            greedy.guess_one(self.weights, self._tops, sample, counts)
        return counts


def fill_index(
    weights: NDArray[np.float64], num_samples: int, outputs: Outputs, num_threads: int
) -> None:
    """Follow the rule from the first sample on, and write every choice.

    Args:
        weights: [num_domains] float64.
        num_samples: how many.
        outputs: dataset_index [num_samples] int16 and dataset_sample_index int64, written.
        num_threads: to use, at most.
    """
    filler = Filler(weights, num_samples, keep=True)
    if filler.plain:
        filler.fill(np.zeros(weights.size), 0, num_samples, outputs)
        return
    parts = _parts(num_samples, SMALLEST_PART, num_threads)
    starts = [filler.guess(part.start) for part in parts]
    ends = [counts.copy() for counts in starts]

    def fill_part(number: int) -> None:
        part = parts[number]
        filler.for_another_thread().fill(ends[number], part.start, part.stop, _cut(outputs, part))

    for_each(fill_part, range(len(parts)), num_threads)
    counts = ends[0]
    for part, guessed, end in zip(parts[1:], starts[1:], ends[1:], strict=True):
        counts = _fill_again(filler, counts, guessed, part, outputs, end)


def _fill_again(
    filler: Filler,
    counts: NDArray[np.float64],
    guessed: NDArray[np.float64],
    part: range,
    outputs: Outputs,
    end: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Mend a part that was filled from ``guessed`` and came to ``end``, to one from ``counts``.

    Returns:
        The counts after it.
    """
    sample, piece = part.start, FIRST_PIECE
    while not np.array_equal(counts, guessed):
        if sample == part.stop:
            return counts
        again = range(sample, min(sample + piece, part.stop))
        guessed += np.bincount(outputs[0][again.start : again.stop], minlength=counts.size)
        filler.fill(counts, again.start, again.stop, _cut(outputs, again))
        sample, piece = again.stop, 2 * piece
    return end


def checkpoints(
    filler: Filler, num_samples: int, block_size: int, num_threads: int
) -> NDArray[np.int64]:
    """Counts before each block of samples, and after the last whole one.

    Args:
        filler: of the blend; it only counts.
        num_samples: how many there are.
        block_size: samples in a block.
        num_threads: to use, at most.

    Returns:
        [num_samples // block_size + 1, num_domains] int64.
    """
    num_blocks = num_samples // block_size
    rows = np.empty((num_blocks + 1, filler.weights.size), np.int64)
    smallest = -(-SMALLEST_PART // block_size)
    # Blocks are counted in all lanes at once: parts that leave some over would waste lanes.
    together = LANES if filler.lanes is not None else 1
    parts = (
        [range(num_blocks)] if filler.plain else _parts(num_blocks, smallest, num_threads, together)
    )
    ends = [filler.guess(part.start * block_size) for part in parts]

    def count_part(number: int) -> None:
        _count_blocks(filler.for_another_thread(), ends[number], parts[number], block_size, rows)

    for_each(count_part, range(len(parts)), num_threads)
    counts = ends[0]
    for part, end in zip(parts[1:], ends[1:], strict=True):
        counts = _count_again(filler, counts, part, block_size, rows, end)
    rows[num_blocks] = counts
    return rows


def _count_blocks(
    filler: Filler,
    counts: NDArray[np.float64],
    blocks: range,
    block_size: int,
    rows: NDArray[np.int64],
) -> None:
    """Write the rows of ``blocks``; ``counts`` are brought up to their end."""
    block = blocks.start
    while block < blocks.stop:
        lanes = filler.lanes
        if lanes is not None and block + LANES <= blocks.stop and block_size % TILE == 0:
            starts = lanes.fill_stretches(counts, block * block_size, block_size, *NO_OUTPUTS)
            rows[block : block + len(starts)] = starts
            block += len(starts)
        else:
            rows[block] = counts
            filler.advance(counts, block * block_size, (block + 1) * block_size)
            block += 1


def _count_again(
    filler: Filler,
    counts: NDArray[np.float64],
    blocks: range,
    block_size: int,
    rows: NDArray[np.int64],
    end: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Mend the rows of blocks that were counted from a guess and came to ``end``.

    Returns:
        The counts after the blocks.
    """
    for block in blocks:
        if np.array_equal(counts, rows[block]):
            return end
        rows[block] = counts
        filler.advance(counts, block * block_size, (block + 1) * block_size)
    return counts


def _parts(size: int, smallest: int, num_threads: int, multiple: int = 1) -> list[range]:
    """``range(size)`` in parts for the threads, all but the last of a multiple of ``multiple``."""
    number = PARTS_PER_THREAD * num_threads if num_threads > 1 else 1
    units = size // multiple
    parts = even_ranges(units, max(1, min(number, size // smallest)))
    scaled = [range(part.start * multiple, part.stop * multiple) for part in parts]
    return [*scaled[:-1], range(scaled[-1].start, size)]


def _cut(outputs: Outputs, part: range) -> Outputs:
    return outputs[0][part.start : part.stop], outputs[1][part.start : part.stop]
