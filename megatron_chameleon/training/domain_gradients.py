"""Per-domain gradients from a single pass over the global batch.

The samples of the batch are sorted by domain, so that each micro-batch has a single domain. Each
domain's gradient is copied from the gradient buffers before the next domain's gradient is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.sampler import Batch, to_device
from megatron_chameleon.training.optimizer import is_counted

# A dot product is computed in chunks of this many products. Each chunk is summed in float32, and
# the sums of the chunks are added in float64. Larger chunks would be less exact and no faster.
CHUNK = 1 << 10

# Number of chunks per batched matrix multiplication. It limits the memory of the chunks' sums.
CHUNKS_AT_ONCE = 512

Span = tuple[int, int]


class DomainGradients:
    """Gradients of the domains' mean losses over one global batch.

    The storage for one gradient per domain is allocated once. With the distributed optimizer, a
    rank stores only its shard of each gradient.

    Args:
        model: this rank's chunks, wrapped for data parallelism.
        num_domains: number of domains (k), including the target of a hook, if it has one.

    Attributes:
        domain_tokens: [k] float64, tokens with a loss per domain in the global batch.
        learning_rate: learning rate of the upcoming update.
        present: domains with tokens in the batch, in order; gradients of other domains are zero.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], num_domains: int) -> None:
        self._buckets = list(_buckets(model, num_domains))

    def start_batch(self, domain_tokens: torch.Tensor, learning_rate: float) -> None:
        """Start a global batch; call this before its gradients are computed."""
        self.domain_tokens, self.learning_rate = domain_tokens, learning_rate
        self.present = [domain for domain, tokens in enumerate(domain_tokens.tolist()) if tokens]
        present = torch.tensor(self.present, dtype=torch.int64)
        self._present = to_device(present, domain_tokens.device)

    def keep(self, domain: int) -> None:
        """Store the gradient buffers as the gradient of ``domain``, one of ``present``."""
        for bucket in self._buckets:
            bucket.rows[self.present.index(domain)].copy_(bucket.gradient)

    def dot_products(self) -> torch.Tensor:
        """Dot products of all pairs of gradients: [k, k] float64, identical on every rank."""
        k, count = self.domain_tokens.numel(), len(self.present)
        products = torch.zeros(k, k, dtype=torch.float64, device=self.domain_tokens.device)
        total = products.new_zeros(count, count)
        for bucket in self._buckets:
            for start, stop in bucket.spans:
                total += span_products(bucket.rows[:count, start:stop])
        dist.all_reduce(total)
        products[self._present[:, None], self._present] = total
        return products

    def combine(self, weights: torch.Tensor) -> None:
        """Write the sum of the gradients, weighted by ``weights`` [k], to the gradient buffers.

        All ranks use the weights of rank 0: the last digits of a hook's result may depend on the
        processor, so replicas of the same parameters would diverge if each rank used its own
        result.
        """
        agreed = to_device(weights.to(torch.float64, copy=True), self.domain_tokens.device)
        dist.broadcast(agreed, src=0)
        factors = agreed[self._present].float()
        for bucket in self._buckets:
            if self.present:
                rows = bucket.rows[: len(self.present)]
                torch.mv(rows.T, factors, out=bucket.gradient)
            else:
                bucket.gradient.zero_()


def micro_batches_by_domain(
    micro_batches: Sequence[Batch],
    rows: Mapping[int, Sequence[int]],
    largest: int,
    pipeline: int = 1,
    rounds: int = 1,
) -> dict[int, list[Batch]]:
    """Regroup one rank's samples into micro-batches that each contain samples of one domain.

    Each field is indexed once for all micro-batches, without communication between ranks.
    Each domain has as few micro-batches as possible, of about the same size, the largest first.
    Padding samples come last and have no loss.

    Args:
        micro_batches: one rank's micro-batches of a step.
        rows: domain -> indices of its samples in the concatenated ``micro_batches``.
        largest: maximum number of samples in a micro-batch.
        pipeline: number of pipeline stages; if there are several, all micro-batches of a domain
            have the same size.
        rounds: the number of micro-batches is a multiple of this number, as interleaved pipeline
            stages require.
    """
    counts, padded = {}, {}
    for domain, own in rows.items():
        count = max(-(-len(own) // largest), 1)
        counts[domain] = count = -(-count // rounds) * rounds
        filled = -(-len(own) // count) * count if pipeline > 1 else len(own)
        padded[domain] = [*own, *[0] * (max(filled, count) - len(own))]
    index = torch.tensor([row for own in padded.values() for row in own], dtype=torch.int64)
    index = to_device(index, micro_batches[0]["tokens"].device)
    fields = {
        name: torch.cat([batch[name] for batch in micro_batches])[index].split(
            [len(own) for own in padded.values()]
        )
        for name in micro_batches[0]
    }
    found = {}
    for number, (domain, own) in enumerate(rows.items()):
        fields["loss_mask"][number][len(own) :] = 0.0
        parts = {name: part[number].tensor_split(counts[domain]) for name, part in fields.items()}
        found[domain] = [
            {name: part[turn] for name, part in parts.items()} for turn in range(counts[domain])
        ]
    return found


@dataclasses.dataclass
class GradientBucket:
    """This rank's part of one bucket of the gradient buffers.

    Attributes:
        gradient: [n] float32 view of the bucket, or of this rank's shard of it.
        spans: ranges of ``gradient`` that this rank includes in dot products; other ranks include
            the remaining ranges.
        rows: [k, n] float32; row i is the gradient of the i-th domain of the batch.
    """

    gradient: torch.Tensor
    spans: list[Span]
    rows: torch.Tensor


def span_products(rows: torch.Tensor) -> torch.Tensor:
    """Dot products of ``rows`` [m, n] float32 with each other: [m, m] float64.

    Chunks of ``CHUNK`` products are summed in float32 for speed; their sums are added in float64.
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


def _buckets(model: Sequence[DistributedDataParallel], count: int) -> Iterator[GradientBucket]:
    """This rank's part of each bucket, with storage for ``count`` rows."""
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
                # ``first`` to ``last`` is this rank's shard. Without the distributed optimizer,
                # every data-parallel rank holds all gradients, but includes only this range in dot
                # products, so that the sum over the ranks includes each gradient once.
                first, last = (numel * r // group.size() for r in (group.rank(), group.rank() + 1))
                gradient = bucket.grad_data[first:last] if sharded else bucket.grad_data
                mine = bucket.offset + first, bucket.offset + last
                spans = spans_within(counted, mine, bucket.offset + (first if sharded else 0))
                yield GradientBucket(gradient, spans, gradient.new_empty(count, gradient.numel()))


def spans_within(spans: Iterable[Span], within: Span, origin: int) -> list[Span]:
    """Intersect ``spans`` with ``within``, shift by -``origin``, and join adjacent spans."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        start, stop = max(start, within[0]) - origin, min(stop, within[1]) - origin
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found
