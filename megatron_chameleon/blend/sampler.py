"""Micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

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
    unit = micro_batch_size * data_parallel_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        choices = [str(size) for size in (below, below + unit) if size > 0]
        raise UserError(
            f"--global-batch-size {global_batch_size} is not a multiple of {unit}, the "
            f"--micro-batch-size {micro_batch_size} times {data_parallel_size} data-parallel "
            f"rank(s); {' or '.join(choices)} would work, or another --micro-batch-size"
        )


def micro_batches(
    dataset: SampleSource,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    start_step: int = 0,
) -> Iterator[Batch]:
    """One rank's micro-batches in order, from the start of any step.

    Step t consists of samples t*g to (t+1)*g - 1 in every layout, with the global batch size g;
    micro-batch i of rank r begins at sample t*g + (i*data_parallel_size + r)*micro_batch_size.
    Samples beyond the last whole global batch are left out.

    Args:
        dataset: the samples.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per micro-batch (b).
        data_parallel_rank: of this rank.
        data_parallel_size: ranks over which the samples of a step are sharded.
        start_step: step to start with.

    Yields:
        Dictionaries of stacked tensors: tokens [b, s], domain [b] and so on.

    Raises:
        UserError: if the global batch cannot be sharded equally.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, data_parallel_size)
    stride = data_parallel_size * micro_batch_size
    for step in range(start_step, len(dataset) // global_batch_size):
        first = step * global_batch_size + data_parallel_rank * micro_batch_size
        for start in range(first, (step + 1) * global_batch_size, stride):
            yield dataset.batch(range(start, start + micro_batch_size))
