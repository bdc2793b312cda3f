from __future__ import annotations

import pytest
import torch

from megatron_chameleon.blend.sampler import MicroBatchIterator, batch_indices
from megatron_chameleon.errors import UserError


class Numbers:
    """Sample i is the number i, twice."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def batch(self, indices):
        self.read += indices
        domain = torch.tensor(indices)
        return {"tokens": domain[:, None].repeat(1, 2), "domain": domain}


@pytest.mark.parametrize("step", [0, 1, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_partition_the_samples_of_a_step(step, size, micro_batch_size):
    ranks = [list(batch_indices(step, 24, micro_batch_size, rank, size)) for rank in range(size)]
    assert {len(rank) for rank in ranks} == {24 // (micro_batch_size * size)}
    # Taken micro-batch by micro-batch over the ranks, the order is the same at every layout.
    in_order = [index for turn in zip(*ranks, strict=True) for part in turn for index in part]
    assert in_order == list(range(step * 24, step * 24 + 24))


def test_a_resumed_iterator_continues_with_the_same_batches():
    def domains(start_step):
        batches = MicroBatchIterator(Numbers(26), 6, 1, 1, 2, start_step)
        return [batch["domain"].tolist() for batch in batches]

    whole = domains(0)
    assert len(whole) == 12  # four whole steps of three micro-batches; two samples are left over
    for step in range(5):
        assert domains(step) == whole[3 * step :]


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((10, 2, 3), "multiple of 6.*6 or 12 would work"),
        ((4, 2, 4), "multiple of 8.* 8 would work"),
        ((0, 2, 4), "at least 1"),
        ((4, 0, 4), "at least 1"),
    ],
)
def test_batch_sizes_that_cannot_be_partitioned_are_rejected(sizes, problem):
    global_batch_size, micro_batch_size, data_parallel_size = sizes
    with pytest.raises(UserError, match=problem):
        batch_indices(0, global_batch_size, micro_batch_size, 0, data_parallel_size)
    with pytest.raises(UserError, match=problem):
        MicroBatchIterator(Numbers(100), global_batch_size, micro_batch_size, 0, data_parallel_size)
