"""Micro-batches in every layout, prefetched or not."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

from megatron_chameleon.blend import sampler
from megatron_chameleon.blend.sampler import (
    Batch,
    micro_batches,
    place_in_step,
    prefetch,
    read_ahead,
    steps_between_changes,
)
from megatron_chameleon.errors import UserError

CPU = torch.device("cpu")


class Samples:
    """Numbered samples; records which of them are read, and on which thread."""

    def __init__(self, count, broken_from=None):
        self.count, self.broken_from = count, broken_from
        self.read, self.threads = [], set()

    def __len__(self):
        return self.count

    def batch(self, indices):
        if self.broken_from is not None and indices[0] >= self.broken_from:
            raise UserError(f"sample {indices[0]} cannot be read")
        self.read.append(list(indices))
        self.threads.add(threading.current_thread())
        return {"tokens": torch.tensor(indices)}


def numbers(batches):
    return [batch["tokens"].tolist() for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_partition_the_samples_of_each_step(size, micro_batch_size):
    # Two samples are left over after four whole steps.
    ranks = [
        numbers(micro_batches(Samples(98), 24, micro_batch_size, rank, size, start_step=1))
        for rank in range(size)
    ]
    assert {len(rank) for rank in ranks} == {3 * 24 // (micro_batch_size * size)}
    # Taking one micro-batch of each rank in turn gives the same order in every layout.
    in_order = [index for turn in zip(*ranks, strict=True) for part in turn for index in part]
    assert in_order == list(range(24, 96))
    places = place_in_step(np.arange(24), micro_batch_size, size)
    for number, (rank, micro_batch, row) in enumerate(zip(*places, strict=True)):
        assert ranks[rank][micro_batch][row] == 24 + number


def test_batch_sizes_that_cannot_be_partitioned_are_rejected():
    with pytest.raises(UserError, match=r"multiple of 6.*6 or 12 would work"):
        next(micro_batches(Samples(100), 10, 2, 0, 3))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_prefetching_changes_no_batch(depth, monkeypatch):
    monkeypatch.setattr(sampler, "READ_AHEAD", depth)
    samples = Samples(24)
    with contextlib.closing(prefetch(micro_batches(samples, 6, 2), CPU)) as ahead:
        assert numbers(ahead) == numbers(micro_batches(Samples(24), 6, 2))
    assert threading.current_thread() not in samples.threads
    with read_ahead(micro_batches(samples, 6, 2), CPU) as batches:  # no thread is needed on the CPU
        next(batches)
    assert threading.current_thread() in samples.threads


def test_an_error_or_close_stops_the_thread():
    broken = prefetch(micro_batches(Samples(24, broken_from=8), 6, 2), CPU)
    assert [next(broken)["tokens"][0] for _ in range(4)] == [0, 2, 4, 6]
    with pytest.raises(UserError, match="sample 8 cannot be read"):
        next(broken)
    for taken in (0, 1, 3):
        before, samples = threading.active_count(), Samples(600)
        ahead = prefetch(micro_batches(samples, 6, 2), CPU)
        for _ in range(taken):
            next(ahead)
        ahead.close()
        assert threading.active_count() == before
        assert len(samples.read) <= taken + sampler.READ_AHEAD
        assert list(ahead) == []


@pytest.mark.parametrize(("first_step", "steps"), [(0, [3, 1]), (1, [2, 1]), (3, [1])])
def test_each_part_is_prefetched_when_its_first_batch_is_read(first_step, steps):
    """Later parts are not read ahead, because the mixture may change before their first batch."""
    samples, count = Samples(24), threading.active_count()
    assert steps_between_changes(first_step, 4, 3) == steps
    parts = [3 * each for each in steps]
    ahead = prefetch(micro_batches(samples, 6, 2, start_step=first_step), CPU, parts)
    read: list[Batch] = []
    for part in parts:
        assert len(samples.read) == len(read)
        read.append(next(ahead))
        end = len(read) + min(part - 1, sampler.READ_AHEAD)
        wait_until(lambda end=end: len(samples.read) == end)
        read += [next(ahead) for _ in range(part - 1)]
    assert list(ahead) == []
    assert numbers(read) == numbers(micro_batches(Samples(24), 6, 2, start_step=first_step))
    assert threading.active_count() == count
