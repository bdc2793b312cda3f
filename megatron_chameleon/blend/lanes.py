"""The greedy rule on many stretches of samples at once, one in each lane of the vector registers.

A stretch can start before the one in front of it is done, because its starting counts can be
guessed: whatever the counts are, the rule soon leads to the same choices. Afterwards each stretch
is compared with the end of the one before it, and followed anew from there until the two agree,
which takes two samples as a rule. So what is filled is exact, however wrong a guess; where too many
are wrong, as with domains that are chosen once in a million samples, the rule is followed sample by
sample for a while.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.blend import calendar_queue, greedy
from megatron_chameleon.blend.fixed_point import MOST_SAMPLES, fixed_point_kernel, suits
from megatron_chameleon.blend.float_kernel import BLOCK, float_kernel
from megatron_chameleon.blend.tiles import LINE_BYTES, TILE
from megatron_chameleon.blend.vectors import LANES

# A stretch of an odd number of tiles, so that the lanes' outputs do not share cache sets.
LONGEST_STRETCH = 513 * TILE
# Below, guesses cost more than lanes save.
SHORTEST_STRETCH = 15 * TILE
# Samples for which a wrong guess is followed until it agrees; then the stretch is filled again.
MOST_FOLLOWED = 2048
# From this share of tiles on that fixed point cannot tell, as of weights that tie all the time,
# float64 is faster.
TOO_MANY_ANEW = 0.1
# With less than this share of stretches exact, lanes are no faster than one sample after another,
# which is the way then for a while and, where it comes to that again, for twice as long.
TOO_FEW_EXACT = 0.1
LONGEST_PAUSE = 32
# One after another, so many domains are better looked through by calendar; with so many, a calendar
# is as fast as lanes that are all exact.
FEWEST_IN_CALENDAR = 64
CALENDAR_WINS = 600


class LaneFiller:
    """:func:`greedy.fill` for one set of weights, on as many stretches as there are lanes.

    Args:
        weights: [num_domains] float64, two or more.
        keep: whether the choices are written, or only counted.
        tops: [num_domains] float64, the errors at which domains are chosen, NaN where unknown;
            corrected by what is filled.
    """

    def __init__(self, weights: NDArray[np.float64], keep: bool, tops: NDArray[np.float64]) -> None:
        self._weights, self._keep, self._tops = weights, keep, tops
        self._fixed_point = suits(weights)
        # Domains that are never chosen fill the last block.
        padding = -weights.size % BLOCK
        self._padded_weights = np.append(weights, np.zeros(padding))
        self._counts = np.full((weights.size + padding, LANES), np.inf)
        # Where a calendar is at hand, little is lost by not guessing.
        self._pause = 1 if weights.size < FEWEST_IN_CALENDAR else LANES
        self._too_few = max(TOO_FEW_EXACT, weights.size / CALENDAR_WINS) * LANES

    def fill(
        self,
        counts: NDArray[np.float64],
        first: int,
        stop: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        """As :func:`greedy.fill`, with the same arguments and results."""
        # From a whole cache line on, these can be written past the cache.
        start = min(first + -dataset_sample_index.ctypes.data % LINE_BYTES // 8, stop)
        self._fill_one_by_one(counts, first, start, dataset_index, dataset_sample_index)
        longest, pause = SHORTEST_STRETCH, 1
        while (length := self._stretch(stop - start, longest)) >= SHORTEST_STRETCH:
            outputs = dataset_index[start - first :], dataset_sample_index[start - first :]
            exact = len(self.fill_stretches(counts, start, length, *outputs))
            start += exact * length
            # Short stretches first, of which little is lost where guesses are wrong.
            longest = min(4 * longest, LONGEST_STRETCH)
            if exact > self._too_few:
                pause = 1
                continue
            until = min(start + pause * self._pause * length, stop)
            outputs = dataset_index[start - first :], dataset_sample_index[start - first :]
            self._fill_one_by_one(counts, start, until, *outputs)
            start, pause = until, min(2 * pause, LONGEST_PAUSE)
        outputs = dataset_index[start - first :], dataset_sample_index[start - first :]
        self._fill_one_by_one(counts, start, stop, *outputs)

    def _stretch(self, samples: int, longest: int) -> int:
        """The longest stretch that all lanes can take of so many samples."""
        tiles = min(samples // LANES, longest) // TILE
        return (tiles - 1 + tiles % 2) * TILE

    def _fill_one_by_one(
        self,
        counts: NDArray[np.float64],
        first: int,
        stop: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        outputs = dataset_index, dataset_sample_index
        fill = greedy.fill if self._weights.size < FEWEST_IN_CALENDAR else calendar_queue.fill
        fill(self._weights, counts, first, stop, *outputs, self._tops)

    def fill_stretches(
        self,
        counts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Fill stretches of ``length`` samples, a multiple of the tile, one in each lane.

        Those from the first on that are exact count as filled; at least one is.

        Args:
            counts: [num_domains] float64, before ``first``; brought up to the end of those filled.
            first: first sample.
            length: samples in a stretch.
            dataset_index: [LANES * length] int16, written; or empty.
            dataset_sample_index: [LANES * length] int64, written; or empty.

        Returns:
            [filled, num_domains] float64, the counts before each stretch that is filled.
        """
        outputs = dataset_index, dataset_sample_index
        starts = np.empty((LANES, self._weights.size))
        greedy.guess_starts(self._weights, self._tops, counts, first, length, starts)
        ends = self._run(starts, first, length, *outputs)
        filled = greedy.join(self._weights, MOST_FOLLOWED, starts, ends, first, length, *outputs)
        counts[:] = ends[filled - 1]
        greedy.learn_tops(self._weights, self._tops, starts[:filled], first, length)
        return starts[:filled]

    def _run(
        self,
        starts: NDArray[np.float64],
        first: int,
        length: int,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Fill every lane's stretch from ``starts`` [LANES, num_domains]; the counts at its end."""
        own = self._counts[: self._weights.size]
        own[:] = starts.T
        arguments = first, length, dataset_index, dataset_sample_index
        if self._fixed_point and first + LANES * length <= MOST_SAMPLES:
            anew = fixed_point_kernel(self._keep)(self._weights, own.ravel(), *arguments)
            self._fixed_point = anew < TOO_MANY_ANEW * LANES * length / TILE
        else:
            float_kernel(self._keep)(self._padded_weights, self._counts.ravel(), *arguments)
        return np.ascontiguousarray(own.T)
