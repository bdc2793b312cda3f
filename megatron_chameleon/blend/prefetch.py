"""Micro-batches prefetched by a thread, so that the GPU does not wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType

import torch

from megatron_chameleon.blend.sampler import Batch

READ_AHEAD = 4
ALL_AT_ONCE = (None,)


@dataclasses.dataclass(frozen=True)
class _End:
    """End of the batches, with the error that caused it, if any."""

    error: BaseException | None


class Prefetcher(Iterator[Batch]):
    """Prefetch the batches of another iterator to ``device``, in order.

    A thread reads up to ``depth`` of them ahead into pinned memory, from which they are copied
    while the device computes. An exception of the other iterator is raised in the place of the
    batch that it failed to read. Close it before its samples change.

    Args:
        batches: from now on, only the thread may read them.
        device: destination of the batches.
        depth: batches read ahead.
    """

    def __init__(
        self, batches: Iterator[Batch], device: torch.device, depth: int = READ_AHEAD
    ) -> None:
        assert depth >= 1
        self._batches, self._device = batches, device
        self._ready: queue.SimpleQueue[Batch | _End] = queue.SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._stopping = False
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        item = self._end or self._ready.get()
        if isinstance(item, _End):
            self._end = item
            raise item.error or StopIteration
        self._free.release()
        return {name: part.to(self._device, non_blocking=True) for name, part in item.items()}

    def close(self) -> None:
        """Stop reading and wait for the thread; there are no batches afterwards."""
        self._stopping = True
        self._free.release()
        self._thread.join()
        self._end = _End(None)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # new threads default to device 0
            while self._wait_for_room():
                batch = next(self._batches)
                self._ready.put(self._pinned(batch))
        except StopIteration:
            self._ready.put(_End(None))
        except BaseException as error:  # raised by __next__
            self._ready.put(_End(error))

    def _wait_for_room(self) -> bool:
        self._free.acquire()
        return not self._stopping

    def _pinned(self, batch: Batch) -> Batch:
        if self._device.type != "cuda":
            return batch
        return {name: _pin(part) for name, part in batch.items()}


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    # Pinning keeps strides and fails on expanded tensors, whose elements share memory.
    return tensor.contiguous().pin_memory()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` from the host to ``device`` without waiting for the device's work.

    A copy from memory that is not pinned would wait, even with ``non_blocking``.
    """
    pinned = _pin(tensor) if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


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
    with contextlib.closing(read_parts_ahead(batches, device, parts)) as ahead:
        yield ahead


def read_parts_ahead(
    batches: Iterator[Batch], device: torch.device, parts: Sequence[int | None]
) -> Generator[Batch]:
    """``batches`` through one :class:`Prefetcher` for each of ``parts``."""
    for count in parts:
        with Prefetcher(itertools.islice(batches, count), device) as ahead:
            yield from ahead


def steps_between_changes(first_step: int, train_iters: int, interval: int) -> list[int]:
    """Number of steps of each part of a run that starts at ``first_step``.

    A part ends where the mixture may change: at multiples of ``interval``, or never if it is 0.
    """
    first_change = first_step - first_step % interval + interval if interval else train_iters
    ends = [first_step, *range(first_change, train_iters, interval or 1), train_iters]
    return [end - start for start, end in itertools.pairwise(ends)]
