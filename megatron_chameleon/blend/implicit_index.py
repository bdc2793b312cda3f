"""The blended index without its arrays: counts here and there, and the rule between them."""

from __future__ import annotations

import collections
import threading

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_chameleon.blend import greedy
from megatron_chameleon.blend.fillers import Filler, checkpoints
from megatron_chameleon.blend.index import checked_num_samples, checked_weights
from megatron_chameleon.blend.threads import usable_threads

# Sequential readers need one; a few more serve those who read in some places at once.
RECENT_BLOCKS = 4


class ImplicitBlendingIndices:
    """What :func:`build_blending_indices` gives, in a ten-thousandth of the memory.

    The exact counts are kept every ``block_size`` samples, and between them the greedy rule is
    followed anew. The place last read from is remembered for a few blocks, so that reading on costs
    a step of the rule for each sample, and reading elsewhere up to ``block_size`` steps. Several
    threads may read; a lock lets one of them at a time.

    Args:
        weights: [num_domains] float64, usually summing to 1.
        num_samples: length.
        block_size: samples from one checkpoint to the next.
        num_threads: to be built by; one for every core this process may run on by default.

    Raises:
        ValueError: as :func:`build_blending_indices`, or for blocks of no samples.
    """

    def __init__(
        self,
        weights: ArrayLike,
        num_samples: int,
        block_size: int = 65536,
        num_threads: int | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least one sample")
        self._num_samples = checked_num_samples(num_samples)
        self._block_size = block_size
        self._filler = Filler(checked_weights(weights), num_samples, keep=False)
        threads = usable_threads(num_threads)
        self._checkpoints = checkpoints(self._filler, num_samples, block_size, threads)
        self._recent: collections.OrderedDict[int, tuple[int, NDArray[np.float64]]]
        self._recent = collections.OrderedDict()
        # Counts that are remembered, and what the filler works in, are written in place by compiled
        # code that gives up the interpreter's own lock.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_samples

    @property
    def nbytes(self) -> int:
        """Bytes of counts and weights; some more for the last few places read from."""
        with self._lock:
            places = sum(counts.nbytes for _, counts in self._recent.values())
        return self._checkpoints.nbytes + self._filler.weights.nbytes + places

    def indices(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The blended index at any samples, in any order.

        Args:
            samples: [n] from 0 to ``len(self) - 1``.

        Returns:
            dataset_index [n] int16, the domain of each sample, and
            dataset_sample_index [n] int64, its number within that domain.

        Raises:
            IndexError: for a sample out of range.
        """
        samples = np.asarray(samples, np.int64)
        order = np.argsort(samples, kind="stable")
        ascending = samples[order]
        if samples.size and (ascending[0] < 0 or ascending[-1] >= len(self)):
            raise IndexError(f"samples {ascending[0]} to {ascending[-1]} of {len(self)}")
        found = np.empty(samples.size, np.int16), np.empty(samples.size, np.int64)
        edges = np.flatnonzero(np.diff(ascending // self._block_size)) + 1
        with self._lock:
            for places in np.split(np.arange(samples.size), edges) if samples.size else []:
                self._read(ascending[places], order[places], *found)
        return found

    def counts(self, sample: int) -> NDArray[np.int64]:
        """[num_domains] samples that each domain has given before ``sample``.

        Raises:
            IndexError: for a sample below 0 or above ``len(self)``.
        """
        if not 0 <= sample <= len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        with self._lock:
            return self._counts_before(sample).astype(np.int64)

    def _read(
        self,
        ascending: NDArray[np.int64],
        order: NDArray[np.int64],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        """Look up the samples of one block and write what they are where ``order`` says."""
        first, last = int(ascending[0]), int(ascending[-1])
        counts = self._counts_before(first)
        found = np.empty(ascending.size, np.int16), np.empty(ascending.size, np.int64)
        greedy.read(self._filler.weights, counts, first, ascending, *found)
        dataset_index[order], dataset_sample_index[order] = found
        self._remember(last, counts)

    def _counts_before(self, sample: int) -> NDArray[np.float64]:
        """The counts, the caller's own; the place is remembered."""
        block = sample // self._block_size
        start, counts = self._recent.get(block, (sample + 1, None))
        if counts is None or start > sample:
            start, counts = block * self._block_size, self._checkpoints[block].astype(np.float64)
        self._filler.advance(counts, start, sample)
        self._remember(sample, counts.copy())
        return counts

    def _remember(self, sample: int, counts: NDArray[np.float64]) -> None:
        block = sample // self._block_size
        self._recent[block] = sample, counts
        self._recent.move_to_end(block)
        if len(self._recent) > RECENT_BLOCKS:
            self._recent.popitem(last=False)
