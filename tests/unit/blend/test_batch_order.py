from __future__ import annotations

import itertools

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


def test_the_first_sample_of_each_micro_batch():
    assert list(batch_indices(3, 8, 2, 1, 2)) == [[26, 27], [30, 31]]
    assert list(batch_indices(0, 8, 2, 0, 1)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("step", [0, 1, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_share_every_sample_of_the_step_once(step, size, micro_batch_size):
    ranks = [list(batch_indices(step, 24, micro_batch_size, rank, size)) for rank in range(size)]
    assert {len(rank) for rank in ranks} == {24 // (micro_batch_size * size)}
    # Taken micro-batch by micro-batch over the ranks, the order is the same at every layout.
    in_order = [index for turn in zip(*ranks, strict=True) for part in turn for index in part]
    assert in_order == list(range(step * 24, step * 24 + 24))


def test_batches_are_stacked_samples():
    batch = next(MicroBatchIterator(Numbers(8), 4, 2, start_step=1))
    assert torch.equal(batch["tokens"], torch.tensor([[4, 4], [5, 5]]))
    assert torch.equal(batch["domain"], torch.tensor([4, 5]))


def test_resuming_gives_what_would_have_come():
    def domains(start_step):
        batches = MicroBatchIterator(Numbers(26), 6, 1, 1, 2, start_step)
        return [batch["domain"].tolist() for batch in batches]

    whole = domains(0)
    assert len(whole) == 12  # four whole steps of three micro-batches; two samples are left over
    for step in range(5):
        assert domains(step) == whole[3 * step :]


def test_nothing_is_read_ahead():
    dataset = Numbers(100)
    iterator = MicroBatchIterator(dataset, 4, 2)
    list(itertools.islice(iterator, 3))
    assert dataset.read == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((10, 2, 3), "multiple of 6.*6 or 12 would work"),
        ((4, 2, 4), "multiple of 8.* 8 would work"),
        ((0, 2, 4), "at least 1"),
        ((4, 0, 4), "at least 1"),
    ],
)
def test_batch_sizes_that_ranks_cannot_share_are_refused(sizes, problem):
    global_batch_size, micro_batch_size, data_parallel_size = sizes
    with pytest.raises(UserError, match=problem):
        batch_indices(0, global_batch_size, micro_batch_size, 0, data_parallel_size)
    with pytest.raises(UserError, match=problem):
        MicroBatchIterator(Numbers(100), global_batch_size, micro_batch_size, 0, data_parallel_size)
