"""Samples of each step's global batch, and of each data-parallel rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_chameleon.errors import UserError

Batch = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """Numbered samples, several of which can be read at once."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, stacked."""
        ...


def check_batch_sizes(
    global_batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> None:
    """Check that the global batch can be sharded equally over the ranks.

    Raises:
        UserError: naming valid global batch sizes.
    """
    if micro_batch_size < 1 or global_batch_size < 1:
        raise UserError(
            f"--global-batch-size {global_batch_size} and --micro-batch-size {micro_batch_size} "
            "must be at least 1"
        )
    unit = micro_batch_size * data_parallel_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        choices = [str(size) for size in (below, below + unit) if size > 0]
        raise UserError(
            f"--global-batch-size {global_batch_size} is not a multiple of {unit}, the "
            f"--micro-batch-size {micro_batch_size} times {data_parallel_size} data-parallel "
            f"rank(s); {' or '.join(choices)} would work, or another --micro-batch-size"
        )


def batch_indices(
    step: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[list[int]]:
    """The sample numbers of one step on one rank, a list per micro-batch.

    Step t consists of samples t*g to (t+1)*g - 1 in every layout, with the global batch size g;
    micro-batch i of rank r begins at sample t*g + (i*data_parallel_size + r)*micro_batch_size.

    Raises:
        UserError: if the global batch size is not a multiple of micro-batch size times ranks.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, data_parallel_size)
    assert 0 <= data_parallel_rank < data_parallel_size
    first = step * global_batch_size + data_parallel_rank * micro_batch_size
    stop = (step + 1) * global_batch_size
    starts = range(first, stop, data_parallel_size * micro_batch_size)
    return (list(range(start, start + micro_batch_size)) for start in starts)


class MicroBatchIterator(Iterator[Batch]):
    """One rank's micro-batches in order, from the start of any step.

    Each is a dictionary of stacked tensors: tokens [b, s], domain [b] and so on. It ends after the
    last step for which the data set has a whole global batch.

    Args:
        dataset: the samples.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per micro-batch (b).
        data_parallel_rank: of this rank.
        data_parallel_size: ranks over which the samples of a step are sharded.
        start_step: step to start with.

    Raises:
        UserError: if the global batch cannot be sharded equally.
    """

    def __init__(
        self,
        dataset: SampleSource,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        start_step: int = 0,
    ) -> None:
        check_batch_sizes(global_batch_size, micro_batch_size, data_parallel_size)
        self._dataset = dataset
        self._layout: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
        }
        self.num_steps = len(dataset) // global_batch_size
        self._batches = self._indices_from(start_step)

    def __next__(self) -> Batch:
        return self._dataset.batch(next(self._batches))

    def _indices_from(self, start_step: int) -> Iterator[list[int]]:
        for step in range(start_step, self.num_steps):
            yield from batch_indices(step, **self._layout)
