"""Several gradients of a model side by side, a row each, and arithmetic on whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.training.guards import is_counted

# Numbers of a row whose products are added up in float32; those sums are added up in float64. More
# of them are not faster, and their sum is less exact.
CHUNK = 1 << 10
# Chunks that are multiplied at once.
CHUNKS_AT_ONCE = 512

Span = tuple[int, int]


@dataclasses.dataclass
class Part:
    """What this rank holds of one bucket of the gradient buffers.

    Attributes:
        gradient: [n] float32, in the bucket: all of it, or this rank's shard.
        spans: of it, what this rank counts in products; other ranks count the rest.
        rows: [count, n] float32.
    """

    gradient: torch.Tensor
    spans: list[Span]
    rows: torch.Tensor


class GradientRows:
    """Room for several gradients, which is taken at once and kept from step to step.

    With the distributed optimizer a rank keeps its shard of each alone.

    Args:
        model: this rank's chunks, wrapped for data parallelism.
        count: how many gradients there is room for.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], count: int) -> None:
        self._parts = list(_parts(model, count))
        self._device = self._parts[0].gradient.device

    def keep(self, row: int) -> None:
        """Copy what the gradient buffers hold to ``row``."""
        for part in self._parts:
            part.rows[row].copy_(part.gradient)

    def products(self, count: int) -> torch.Tensor:
        """[count, count] float64: the scalar products of the first rows, the same on every rank."""
        total = torch.zeros(count, count, dtype=torch.float64, device=self._device)
        for part in self._parts:
            for start, stop in part.spans:
                total += span_products(part.rows[:count, start:stop])
        dist.all_reduce(total)
        return total

    def write_sum(self, weights: torch.Tensor) -> None:
        """Put the sum of the first rows by ``weights`` [count] into the gradient buffers."""
        factors = weights.to(self._device, torch.float32)
        for part in self._parts:
            if factors.numel():
                torch.mv(part.rows[: factors.numel()].T, factors, out=part.gradient)
            else:
                part.gradient.zero_()


def span_products(rows: torch.Tensor) -> torch.Tensor:
    """[m, m] float64: the scalar products of ``rows`` [m, n] float32.

    Sums over ``CHUNK`` numbers are taken in float32, at full speed, and added up in float64.
    """
    count, length = rows.shape
    total = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    whole = length - length % CHUNK
    for start in range(0, whole, CHUNK * CHUNKS_AT_ONCE):
        stop = min(start + CHUNK * CHUNKS_AT_ONCE, whole)
        chunks = rows[:, start:stop].unflatten(1, (-1, CHUNK)).transpose(0, 1)  # [c, m, CHUNK]
        total += torch.bmm(chunks, chunks.mT).sum(0, dtype=torch.float64)
    if whole < length:
        rest = rows[:, whole:]
        total += (rest @ rest.T).double()
    return total


def _parts(model: Sequence[DistributedDataParallel], count: int) -> Iterator[Part]:
    """A part for each bucket, with room for ``count`` rows."""
    sharded = bool(model[0].ddp_config.use_distributed_optimizer)
    for chunk in model:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            counted = [
                (start, stop)
                for parameter, (start, stop, _bucket) in buffer.param_index_map.items()
                if is_counted(parameter)
            ]
            for bucket in buffer.buckets:
                numel = bucket.grad_data.numel()
                # Its shard; without shards, data-parallel ranks hold the same gradients, and each
                # multiplies a share of them.
                first, last = (numel * r // group.size() for r in (group.rank(), group.rank() + 1))
                gradient = bucket.grad_data[first:last] if sharded else bucket.grad_data
                mine = bucket.offset + first, bucket.offset + last
                spans = spans_within(counted, mine, bucket.offset + (first if sharded else 0))
                yield Part(gradient, spans, gradient.new_empty(count, gradient.numel()))


def spans_within(spans: Iterable[Span], within: Span, origin: int) -> list[Span]:
    """The parts of ``spans`` that lie ``within``, counted from ``origin``; neighbours joined."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        start, stop = max(start, within[0]) - origin, min(stop, within[1]) - origin
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found
