"""Per-domain gradients from a single pass over the global batch.

The samples of the batch are sorted by domain, so that each micro-batch has a single domain. The
gradient of each domain is copied from the gradient buffers before that of the next is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.training.optimizer import is_counted

# Products of this many numbers are summed in float32, and these sums in float64. Larger chunks are
# less exact and not faster.
CHUNK = 1 << 10

# Chunks per matrix multiplication.
CHUNKS_AT_ONCE = 512

Span = tuple[int, int]


class DomainGradients:
    """Gradients of the domains' mean losses over one global batch.

    Args:
        rows: storage for a gradient of each domain.
        domain_tokens: [k] float64, tokens with a loss per domain in the global batch.
        learning_rate: learning rate of the upcoming update.

    Attributes:
        present: domains with tokens in the batch, in order; the other gradients are zero.
    """

    def __init__(
        self, rows: GradientRows, domain_tokens: torch.Tensor, learning_rate: float
    ) -> None:
        self.domain_tokens, self.learning_rate = domain_tokens, learning_rate
        self.present = [domain for domain, tokens in enumerate(domain_tokens.tolist()) if tokens]
        present = torch.tensor(self.present, dtype=torch.int64)
        self._places = to_device(present, domain_tokens.device)
        self._rows = rows

    def keep(self, domain: int) -> None:
        """Copy the gradient buffers as the gradient of ``domain``."""
        self._rows.keep(self.present.index(domain))

    def dot_products(self) -> torch.Tensor:
        """[k, k] float64: dot products of all pairs of gradients, identical on every rank."""
        k = self.domain_tokens.numel()
        products = torch.zeros(k, k, dtype=torch.float64, device=self.domain_tokens.device)
        products[self._places[:, None], self._places] = self._rows.products(len(self.present))
        return products

    def combine(self, weights: torch.Tensor) -> None:
        """Write the sum of the gradients, weighted by ``weights`` [k], to the gradient buffers.

        All ranks use the weights of rank 0: the last digits of a hook's result may depend on the
        processor, and replicas of the same parameters would diverge.
        """
        agreed = to_device(weights.to(torch.float64, copy=True), self.domain_tokens.device)
        dist.broadcast(agreed, src=0)
        self._rows.write_sum(agreed[self._places])


@dataclasses.dataclass(frozen=True)
class MicroBatching:
    """Micro-batches of one domain's samples on one rank.

    Attributes:
        count: number of micro-batches, at least 1.
        size: samples of the largest; the others have as many, or one fewer.
        filled: samples including padding samples, which have no loss.
    """

    count: int
    size: int
    filled: int


def split_samples(samples: int, largest: int, pipeline: int = 1, rounds: int = 1) -> MicroBatching:
    """Split samples into as few micro-batches as possible, of about the same size.

    Args:
        samples: number of samples; without any, one padding sample is used.
        largest: maximum samples of a micro-batch.
        pipeline: number of pipeline stages; with several, all micro-batches have the same shape.
        rounds: the number of micro-batches is a multiple of this, as interleaved stages require.
    """
    count = max(-(-samples // largest), 1)
    count = -(-count // rounds) * rounds
    size = max(-(-samples // count), 1)
    return MicroBatching(count, size, count * size if pipeline > 1 else max(samples, 1))


def micro_batches_by_domain(
    micro_batches: Sequence[Batch],
    rows: Mapping[int, Sequence[int]],
    splits: Mapping[int, MicroBatching],
) -> dict[int, list[Batch]]:
    """Regroup micro-batches so that each has one domain, with a single gather.

    Args:
        micro_batches: one rank's micro-batches of a step.
        rows: domain -> its samples, as indices into the concatenated ``micro_batches``.
        splits: domain -> how to split its samples; padding samples have no loss.
    """
    filled = [
        row
        for domain, split in splits.items()
        for row in (*rows[domain], *[0] * (split.filled - len(rows[domain])))
    ]
    device = micro_batches[0]["tokens"].device
    index = to_device(torch.tensor(filled, dtype=torch.int64), device)
    chosen = {
        name: torch.cat([batch[name] for batch in micro_batches])[index]
        for name in micro_batches[0]
    }
    sizes = [split.filled for split in splits.values()]
    fields = {name: part.split(sizes) for name, part in chosen.items()}
    found = {}
    for number, (domain, split) in enumerate(splits.items()):
        fields["loss_mask"][number][len(rows[domain]) :] = 0.0
        parts = {name: part[number].tensor_split(split.count) for name, part in fields.items()}
        found[domain] = [
            {name: part[turn] for name, part in parts.items()} for turn in range(split.count)
        ]
    return found


@dataclasses.dataclass
class Part:
    """This rank's part of one bucket of the gradient buffers.

    Attributes:
        gradient: [n] float32 view of the bucket, or of this rank's shard of it.
        spans: ranges of it that this rank counts in dot products; other ranks count the rest.
        rows: [count, n] float32 copies.
    """

    gradient: torch.Tensor
    spans: list[Span]
    rows: torch.Tensor


class GradientRows:
    """Storage for several gradients, allocated once.

    With the distributed optimizer, a rank stores only its shard of each.

    Args:
        model: this rank's chunks, wrapped for data parallelism.
        count: maximum number of gradients.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], count: int) -> None:
        self._parts = list(_parts(model, count))
        self._device = self._parts[0].gradient.device

    def keep(self, row: int) -> None:
        """Copy the gradient buffers to ``row``."""
        for part in self._parts:
            part.rows[row].copy_(part.gradient)

    def products(self, count: int) -> torch.Tensor:
        """[count, count] float64: dot products of the first rows, identical on every rank."""
        total = torch.zeros(count, count, dtype=torch.float64, device=self._device)
        for part in self._parts:
            for start, stop in part.spans:
                total += span_products(part.rows[:count, start:stop])
        dist.all_reduce(total)
        return total

    def write_sum(self, weights: torch.Tensor) -> None:
        """Write the sum of the first rows, weighted by ``weights`` [count], to the buffers."""
        factors = weights.to(self._device, torch.float32)
        for part in self._parts:
            if factors.numel():
                torch.mv(part.rows[: factors.numel()].T, factors, out=part.gradient)
            else:
                part.gradient.zero_()


def span_products(rows: torch.Tensor) -> torch.Tensor:
    """[m, m] float64: dot products of ``rows`` [m, n] float32.

    Chunks of ``CHUNK`` numbers are summed in float32, at full speed, and their sums in float64.
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
    """The part of each bucket, with storage for ``count`` rows."""
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
                # This rank's shard. Without shards, data-parallel ranks hold the same gradients,
                # and each computes the products of this range.
                first, last = (numel * r // group.size() for r in (group.rank(), group.rank() + 1))
                gradient = bucket.grad_data[first:last] if sharded else bucket.grad_data
                mine = bucket.offset + first, bucket.offset + last
                spans = spans_within(counted, mine, bucket.offset + (first if sharded else 0))
                yield Part(gradient, spans, gradient.new_empty(count, gradient.numel()))


def spans_within(spans: Iterable[Span], within: Span, origin: int) -> list[Span]:
    """Intersect ``spans`` with ``within``, relative to ``origin``; join adjacent ones."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        start, stop = max(start, within[0]) - origin, min(stop, within[1]) - origin
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found
