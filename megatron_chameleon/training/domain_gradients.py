"""One gradient per domain, from a single pass over the global batch.

The samples of the batch are sorted by domain, so that each micro-batch holds one domain, and the
gradient of each domain is copied out of the gradient buffers before the next one's begins.
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

# Numbers of a row whose products are added up in float32; those sums are added up in float64. More
# of them are not faster, and their sum is less exact.
CHUNK = 1 << 10

# Chunks that are multiplied at once.
CHUNKS_AT_ONCE = 512

Span = tuple[int, int]


class DomainGradients:
    """Gradients of the domains' mean losses over one global batch.

    Args:
        rows: where they are kept, with room for all domains.
        domain_tokens: [k] float64, tokens of each domain in the global batch that have a loss.
        learning_rate: of the update that they are for.

    Attributes:
        present: domains that the batch has tokens of, in order; the others' gradients are zero.
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
        """Take over what the gradient buffers hold as the gradient of ``domain``."""
        self._rows.keep(self.present.index(domain))

    def dot_products(self) -> torch.Tensor:
        """[k, k] float64: the scalar products of all pairs of gradients, the same on every rank."""
        k = self.domain_tokens.numel()
        products = torch.zeros(k, k, dtype=torch.float64, device=self.domain_tokens.device)
        products[self._places[:, None], self._places] = self._rows.products(len(self.present))
        return products

    def combine(self, weights: torch.Tensor) -> None:
        """Put the gradients' sum by ``weights`` [k] into the gradient buffers, for the update.

        The first rank's weights are taken on all: the last digits of what a hook computes may hang
        on the processor, and ranks that hold the same parameters would drift apart.
        """
        agreed = to_device(weights.to(torch.float64, copy=True), self.domain_tokens.device)
        dist.broadcast(agreed, src=0)
        self._rows.write_sum(agreed[self._places])


@dataclasses.dataclass(frozen=True)
class Split:
    """How the samples of one domain on one rank are cut into micro-batches.

    Attributes:
        count: micro-batches, from 1 on.
        size: samples of the largest; the others have as many, or one fewer.
        filled: samples that go through the model; those beyond the domain's have no loss.
    """

    count: int
    size: int
    filled: int


def split_samples(samples: int, largest: int, pipeline: int = 1, rounds: int = 1) -> Split:
    """As few micro-batches as there can be, all of about the same size.

    Args:
        samples: how many there are; a domain may have none on a rank, where one fills up.
        largest: samples of a micro-batch, at most.
        pipeline: stages; more than one send each other micro-batches of one shape.
        rounds: of what the micro-batches are a multiple: interleaved stages take turns over as
            many as there are stages.
    """
    count = max(-(-samples // largest), 1)
    count = -(-count // rounds) * rounds
    size = max(-(-samples // count), 1)
    return Split(count, size, count * size if pipeline > 1 else max(samples, 1))


def micro_batches_by_domain(
    micro_batches: Sequence[Batch], rows: Mapping[int, Sequence[int]], splits: Mapping[int, Split]
) -> dict[int, list[Batch]]:
    """Micro-batches of one domain each, gathered with one index for all domains.

    Args:
        micro_batches: a step's, of one rank.
        rows: of each domain, its samples, counted over all of ``micro_batches``.
        splits: how they are cut, for each domain wanted; samples without a loss fill them up.
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
