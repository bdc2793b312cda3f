"""One gradient per domain, from a single pass over the global batch.

The rows of the batch are sorted by domain, so that each micro-batch is of one domain, and the
gradient of each domain is taken out of the gradient buffers before the next one's begins. With the
distributed optimizer a rank keeps its shard of each alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_chameleon.blend.sampler import Batch

# Numbers of each gradient that are multiplied at once, in float64.
CHUNK = 1 << 18


class DomainGradients:
    """Gradients of the domains' mean losses over one global batch.

    Args:
        model: this rank's chunks, wrapped for data parallelism.
        domain_tokens: [k] float64, tokens of each domain in the global batch that have a loss.

    Attributes:
        present: domains that the batch has tokens of, in order; the others' gradients are zero.
    """

    def __init__(
        self, model: Sequence[DistributedDataParallel], domain_tokens: torch.Tensor
    ) -> None:
        self.domain_tokens = domain_tokens
        self.present = [domain for domain, tokens in enumerate(domain_tokens.tolist()) if tokens]
        self._model = model
        self._sharded = bool(model[0].ddp_config.use_distributed_optimizer)
        self._gradients: dict[int, list[torch.Tensor]] = {}

    def keep(self, domain: int) -> None:
        """Take over what the gradient buffers hold as the gradient of ``domain``."""
        self._gradients[domain] = [part.clone() for part in self._parts()]

    def dot_products(self) -> torch.Tensor:
        """[k, k] float64: the scalar products of all pairs of gradients, the same on every rank."""
        k, present = self.domain_tokens.numel(), self.present
        products = torch.zeros(k, k, dtype=torch.float64, device=self.domain_tokens.device)
        if not present:
            return products
        inner = torch.zeros(len(present), len(present), dtype=torch.float64)
        inner = inner.to(products.device)
        for number, counted in enumerate(self._counted()):
            for start in range(0, counted.numel(), CHUNK):
                piece = slice(start, start + CHUNK)
                rows = torch.stack([self._gradients[d][number][piece] for d in present]).double()
                inner += (rows * counted[piece]) @ rows.T
        # Without shards, data-parallel ranks hold the same gradients.
        group = None if self._sharded else parallel_state.get_model_parallel_group()
        dist.all_reduce(inner, group=group)
        places = torch.tensor(present, device=products.device)
        products[places[:, None], places] = inner
        return products

    def combine(self, weights: torch.Tensor) -> None:
        """Put the gradients' sum by ``weights`` [k] into the gradient buffers, for the update."""
        factors: list[float] = weights.tolist()
        for number, part in enumerate(self._parts()):
            part.zero_()
            for domain in self.present:
                part.add_(self._gradients[domain][number], alpha=factors[domain])

    def _parts(self) -> Iterator[torch.Tensor]:
        """What this rank holds of each gradient buffer: all of it, or its shard."""
        for chunk in self._model:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    yield self._mine(bucket.grad_data, buffer.data_parallel_group)

    def _counted(self) -> Iterator[torch.Tensor]:
        """For each part, 1 where a number is counted by this rank, 0 where by another one.

        As in megatron's gradient norm: tensor-parallel ranks hold the same vectors, and the last
        stage a copy of the embeddings.
        """
        for chunk in self._model:
            for buffer in chunk.buffers:
                whole = torch.zeros_like(buffer.grad_data)
                for parameter, (start, stop, _bucket) in buffer.param_index_map.items():
                    if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
                        parameter
                    ):
                        whole[start:stop] = 1.0
                for bucket in buffer.buckets:
                    stop = bucket.offset + bucket.grad_data.numel()
                    yield self._mine(whole[bucket.offset : stop], buffer.data_parallel_group)

    def _mine(self, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return shard_buffer(data, group.size())[group.rank()] if self._sharded else data


def samples_run(count: int, multiple_of: int) -> int:
    """Samples that go through the model where a domain has ``count``: some multiple, not 0."""
    return max(-(-count // multiple_of), 1) * multiple_of


def micro_batches_of_rows(
    micro_batches: Sequence[Batch], rows: Sequence[int], micro_batch_size: int, multiple_of: int
) -> list[Batch]:
    """Micro-batches of some samples alone.

    Args:
        micro_batches: a step's, of one rank.
        rows: which samples are wanted, counted over all of ``micro_batches``.
        micro_batch_size: samples in each; the last may have fewer.
        multiple_of: of what their samples are a multiple, from 1 on: pipelines send micro-batches
            of one shape. Samples without a loss fill them up.
    """
    wanted = samples_run(len(rows), multiple_of)
    filled = torch.tensor([*rows, *[0] * (wanted - len(rows))])
    chosen = {
        name: torch.cat([batch[name] for batch in micro_batches])[
            filled.to(micro_batches[0][name].device, non_blocking=True)
        ]
        for name in micro_batches[0]
    }
    chosen["loss_mask"][len(rows) :] = 0.0
    return [
        {name: part[start : start + micro_batch_size] for name, part in chosen.items()}
        for start in range(0, wanted, micro_batch_size)
    ]
