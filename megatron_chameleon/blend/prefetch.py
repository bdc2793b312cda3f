"""Micro-batches prefetched by a thread, so that the GPU does not wait for them."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron_chameleon.blend.sampler import Batch

READ_AHEAD = 4
ALL_AT_ONCE = (None,)


@contextlib.contextmanager
def read_ahead(
    batches: Iterator[Batch], device: torch.device, parts: Sequence[int | None] = ALL_AT_ONCE
) -> Iterator[Iterator[Batch]]:
    """Prefetch ``batches`` inside the block if ``device`` is a GPU.

    On the CPU they are read on demand: a thread would compete with the compute for the cores, and a
    batch takes thousands of times less than a step.

    Args:
        batches: to be read.
        device: their destination.
        parts: number of batches in each part, between which the samples may change; no batch of a
            part is read before its first one is requested. By default one part.
    """
    if device.type != "cuda":
        yield batches
        return
    with contextlib.closing(prefetch(batches, device, parts)) as ahead:
        yield ahead


def prefetch(
    batches: Iterator[Batch], device: torch.device, parts: Sequence[int | None] = ALL_AT_ONCE
) -> Generator[Batch]:
    """Yield ``batches`` on ``device``, in order, each part as in :func:`read_ahead`.

    A thread reads up to ``READ_AHEAD`` of them ahead into pinned memory, from which they are copied
    while the device computes. An error is raised in the place of the batch that it prevented. Close
    the generator before the samples change.
    """

    def read(part: Iterator[Batch]) -> Batch | None:
        batch = next(part, None)
        return batch and {name: _pinned(tensor, device) for name, tensor in batch.items()}

    def prepare() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # new threads default to device 0

    pool = ThreadPoolExecutor(1, "prefetch", initializer=prepare)
    try:
        for count in parts:
            part = itertools.islice(batches, count)
            ahead = deque(pool.submit(read, part) for _ in range(READ_AHEAD))
            while (batch := ahead.popleft().result()) is not None:
                ahead.append(pool.submit(read, part))
                yield {name: t.to(device, non_blocking=True) for name, t in batch.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` from the host to ``device`` without waiting for the device's work.

    A copy from memory that is not pinned would wait, even with ``non_blocking``.
    """
    return _pinned(tensor, device).to(device, non_blocking=True)


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor
    # Pinning keeps strides and fails on expanded tensors, whose elements share memory.
    return tensor.contiguous().pin_memory()


def steps_between_changes(first_step: int, train_iters: int, interval: int) -> list[int]:
    """Number of steps of each part of a run that starts at ``first_step``.

    A part ends where the mixture may change: at multiples of ``interval``, or never if it is 0.
    """
    first_change = first_step - first_step % interval + interval if interval else train_iters
    ends = [first_step, *range(first_change, train_iters, interval or 1), train_iters]
    return [end - start for start, end in itertools.pairwise(ends)]
