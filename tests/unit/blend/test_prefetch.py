"""Reading ahead changes no batch, hides no error and leaves no thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron_chameleon.blend.prefetch import (
    READ_AHEAD,
    Prefetcher,
    read_ahead,
    read_parts_ahead,
    steps_between_changes,
)
from megatron_chameleon.blend.sampler import Batch, MicroBatchIterator
from megatron_chameleon.errors import UserError

CPU = torch.device("cpu")


class Samples:
    """Numbered samples; notes which are read, and on which thread."""

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
        return {"tokens": torch.tensor(indices)[:, None] * torch.arange(1, 5)}


def batches_of(samples, start_step=0):
    return MicroBatchIterator(samples, 6, 2, start_step=start_step)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_the_batches_are_the_same_in_the_same_order(depth):
    expected = list(batches_of(Samples(24), start_step=1))
    assert len(expected) == 9
    samples = Samples(24)
    with Prefetcher(batches_of(samples, start_step=1), CPU, depth) as ahead:
        read = list(ahead)
    for mine, right in zip(read, expected, strict=True):
        assert mine.keys() == right.keys()
        assert torch.equal(mine["tokens"], right["tokens"])
    assert threading.current_thread() not in samples.threads


def test_an_error_is_raised_in_place_of_its_batch():
    with Prefetcher(batches_of(Samples(24, broken_from=8)), CPU) as ahead:
        for number in range(4):
            assert next(ahead)["tokens"][0, 0] == 2 * number
        for _ in range(2):
            with pytest.raises(UserError, match="sample 8 cannot be read"):
                next(ahead)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_close_stops_the_thread(taken):
    before = threading.active_count()
    ahead = Prefetcher(batches_of(Samples(600)), CPU, depth=2)
    for _ in range(taken):
        next(ahead)
    ahead.close()
    assert threading.active_count() == before
    assert list(ahead) == []
    ahead.close()


def test_there_is_no_prefetching_on_the_cpu():
    samples = Samples(24)
    with read_ahead(batches_of(samples), CPU) as batches:
        assert samples.read == []
        next(batches)
        assert samples.threads == {threading.current_thread()}


def test_expanded_tensors_are_pinned_as_contiguous_copies(monkeypatch):
    """torch pins by copying into memory of the same strides, which fails where elements overlap."""
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        pinned.append(copy.copy_(tensor))
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    expanded = torch.arange(4).expand(3, 4)
    with pytest.raises(RuntimeError, match="single memory location"):
        expanded.pin_memory()
    ahead = Prefetcher(iter([{"position_ids": expanded}]), torch.device("cuda"))
    wait_until(lambda: pinned)
    ahead.close()
    assert torch.equal(pinned[0], expanded)


@pytest.mark.parametrize("first_step", [0, 1, 3])
def test_each_part_is_prefetched_when_its_first_batch_is_read(first_step):
    """The samples may change before the first batch of a part is requested."""
    expected = list(batches_of(Samples(24), first_step))
    samples, count = Samples(24), threading.active_count()
    parts = [3 * steps for steps in steps_between_changes(first_step, 4, 3)]
    ahead = read_parts_ahead(batches_of(samples, first_step), CPU, parts)
    read: list[Batch] = []
    for part in parts:
        assert len(samples.read) == len(read)
        read.append(next(ahead))
        end = len(read) + min(part - 1, READ_AHEAD)
        wait_until(lambda end=end: len(samples.read) == end)
        read += [next(ahead) for _ in range(part - 1)]
    assert list(ahead) == []
    assert [batch["tokens"].tolist() for batch in read] == [
        batch["tokens"].tolist() for batch in expected
    ]
    assert threading.active_count() == count


@pytest.mark.parametrize(
    ("first_step", "interval", "steps"),
    [
        (0, 0, [10]),
        (7, 0, [3]),
        (0, 4, [4, 4, 2]),
        (3, 4, [1, 4, 2]),
        (4, 4, [4, 2]),
        (9, 4, [1]),
        (8, 2, [2]),
        (0, 10, [10]),
        (0, 99, [10]),
    ],
)
def test_parts_end_where_the_mixture_may_change(first_step, interval, steps):
    assert steps_between_changes(first_step, 10, interval) == steps
