"""One gradient per domain, from a single pass over the global batch.

The rows of the batch are sorted by domain, so that each micro-batch is of one domain, and the
gradient of each domain is taken out of the gradient buffers before the next one's begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.training.gradient_rows import GradientRows


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
