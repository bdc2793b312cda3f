"""Micro-batches of one data-parallel rank, prefetched by a thread on GPUs."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_chameleon.errors import UserError

Batch = dict[str, torch.Tensor]

READ_AHEAD = 4
ALL_AT_ONCE = (None,)


class SampleSource(Protocol):
    """A data set of numbered samples that can read several samples at once."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these numbers, stacked."""
        ...


def check_batch_sizes(
    global_batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> None:
    """Check that the global batch can be sharded equally over the ranks.

    Raises:
        UserError: if it cannot; the message names valid global batch sizes.
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
    """Yield the micro-batches of one rank in order, from ``start_step`` on.

    Step t consists of samples t*g to (t+1)*g - 1 in every layout, with the global batch size g;
    micro-batch i of rank r begins at sample t*g + (i*data_parallel_size + r)*micro_batch_size.
    Samples beyond the last whole global batch are left out.

    Args:
        dataset: the samples.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per micro-batch (b).
        data_parallel_rank: index of this rank.
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


def require_embeddings(
    batches: Iterator[Batch], num_embeddings: int, names: Sequence[str] = ()
) -> Iterator[Batch]:
    """Yield ``batches``, which are on the host, and check their tokens and labels.

    A tokenizer may have more tokens than the model has embeddings, such as special tokens that text
    does not contain.

    Args:
        batches: batches with tokens [b, s], and possibly labels [b, s] and domain [b].
        num_embeddings: number of the model's embeddings, without padding.
        names: names of the domains, for messages.

    Raises:
        UserError: for a token without an embedding.
    """
    for batch in batches:
        for name in ("tokens", "labels"):
            if name not in batch:
                continue
            ids = batch[name].numpy()  # fails for a tensor on a device, whose read would wait
            if not ids.size or ids.max() < num_embeddings:
                continue
            row = int((ids >= num_embeddings).any(axis=1).argmax())
            where = f" of domain '{names[int(batch['domain'][row])]}'" if names else ""
            raise UserError(no_embedding(int(ids[row].max()), num_embeddings, where))
        yield batch


def no_embedding(token: int, num_embeddings: int, where: str) -> str:
    """Return the message for a token id without an embedding; ``where`` is its text."""
    return (
        f"token id {token}{where} has no embedding: the model has {num_embeddings:,} embeddings, "
        "and its tokenizer more tokens; leave out documents with such tokens, or pass the "
        "model's own tokenizer (--tokenizer-model, where the command has this flag) or another "
        "model"
    )


def place_in_step(
    positions: NDArray[np.int64], micro_batch_size: int, data_parallel_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where :func:`micro_batches` yields the samples of a step.

    Args:
        positions: [n] positions of samples in their global batch.
        micro_batch_size: samples per micro-batch.
        data_parallel_size: ranks over which the samples are sharded.

    Returns:
        The data-parallel rank, the number of the micro-batch on that rank, and the row in that
        micro-batch; all [n].
    """
    batches, rows = np.divmod(positions, micro_batch_size)
    numbers, ranks = np.divmod(batches, data_parallel_size)
    return ranks, numbers, rows


@contextlib.contextmanager
def read_ahead(
    batches: Iterator[Batch], device: torch.device, parts: Sequence[int | None] = ALL_AT_ONCE
) -> Iterator[Iterator[Batch]]:
    """Prefetch ``batches`` inside the block if ``device`` is a GPU.

    On the CPU they are read on demand: reading a batch takes thousands of times less time than a
    step, and a thread would compete with the computation for the cores.

    Args:
        batches: the batches to read.
        device: device to copy them to.
        parts: number of batches in each part; default: one part. The samples may change between
            parts: no batch of a part is read before the first batch of that part is requested.
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

    A thread reads up to ``READ_AHEAD`` batches ahead into pinned memory, from which they are copied
    while the device computes. If reading a batch fails, its error is raised when that batch is
    requested. Close the generator before the samples change.
    """

    def read(part: Iterator[Batch]) -> Batch | None:
        batch = next(part, None)
        return batch and {name: _pinned(tensor, device) for name, tensor in batch.items()}

    def prepare() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread would use device 0

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
    """Copy ``tensor`` from the host to ``device`` without synchronizing with the device.

    Copies from memory that is not pinned synchronize even with ``non_blocking``.
    """
    return _pinned(tensor, device).to(device, non_blocking=True)


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor
    # Pinning keeps strides and fails on expanded tensors, whose elements share memory.
    return tensor.contiguous().pin_memory()


def steps_between_changes(first_step: int, train_iters: int, interval: int) -> list[int]:
    """Divide the steps from ``first_step`` on into parts, and return their numbers of steps.

    A part ends where the mixture may change: at multiples of ``interval``, or never if it is 0.
    """
    first_change = first_step - first_step % interval + interval if interval else train_iters
    ends = [first_step, *range(first_change, train_iters, interval or 1), train_iters]
    return [end - start for start, end in itertools.pairwise(ends)]
