"""Training samples drawn from domains by weights that may change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.utils import normalize
from numpy.typing import NDArray

from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.gather import View, ViewTable
from megatron_chameleon.blend.implicit_index import ImplicitBlendingIndices
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase, check_changes
from megatron_chameleon.blend.streams import (
    EpochStream,
    FeistelStream,
    MegatronStream,
    Stream,
    megatron_index_bytes,
)
from megatron_chameleon.blend.threads import for_each, usable_threads
from megatron_chameleon.blend.token_data import TokenData, check_enough_tokens, check_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.options.data import Permutation

Batch = dict[str, torch.Tensor]

# By how much more than asked Megatron builds of each data set that it blends. It decides the
# number of whole epochs, and with that the order.
MEGATRON_SURPLUS = 0.005
# Minutes at the start: how often each domain is drawn is counted over all samples of a run.
MAX_SAMPLES = 2**36


class BlendedTokens(torch.utils.data.Dataset[Batch]):
    """Samples of a run in their order, its domains blended by a schedule of weights.

    Every rank builds its own indices, from these arguments alone: no rank waits for another and
    no disk is shared. Domains that give no sample are never opened.

    With ``permutation="megatron"`` the samples are those of Megatron's BlendedDataset over its
    GPTDatasets; the weights cannot change then, since its order hangs on the number of samples.
    With "epoch" and "feistel" a domain's samples are a function of the seed, its ``order_key`` and
    their number alone, so the weights can change at any sample.

    One thread reads samples; others may ask for :meth:`counts` meanwhile, as a run does of itself
    while its next batches are read ahead. Weights are changed while nobody reads.

    Args:
        data: where the tokens are.
        schedule: weights of the domains, in the order of ``data.domains``; scaled to sum to 1.
        num_samples: length of the data set.
        seq_length: tokens per sample (s); the labels are the same tokens, one further on.
        seed: of the order of documents and samples within each domain.
        permutation: by what they are ordered.
        boundaries: what becomes of the ends of documents within a sample.
        cache: folder for Megatron's indices; None keeps them in memory alone.
        by_size: whether the weights are sizes, as Megatron takes them where it is given none: it
            scales them once instead of twice, and builds no surplus.

    Raises:
        UserError: for weights that cannot be drawn by, a domain with too few tokens, files that
            are not what they were, or weights that change in Megatron's order.
    """

    def __init__(
        self,
        data: TokenData,
        schedule: MixtureSchedule,
        num_samples: int,
        seq_length: int,
        seed: int,
        permutation: Permutation = "megatron",
        boundaries: DocumentBoundaries | None = None,
        cache: Path | None = None,
        by_size: bool = False,
    ) -> None:
        self.data, self.schedule = data, schedule
        self.seq_length, self.permutation = seq_length, permutation
        self._num_samples, self._seed = num_samples, seed
        self._cache, self._by_size = cache, by_size
        self._boundaries = boundaries or DocumentBoundaries(data.tokenizer.eod_id)
        self._streams: dict[int, Stream] = {}
        self._views: dict[int, View] = {}
        self._table = ViewTable.empty(len(data.domains))
        self._next_unread = 0
        self._check(schedule)
        self._check_size()
        self._phases = self._blend(schedule)
        self._open(self.counts(num_samples))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index``: the values of :meth:`batch`, without their first dimension."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: part[0] for name, part in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> Batch:
        """Several samples at once, gathered by one compiled call.

        Returns:
            tokens [b, s] int64, labels [b, s] int64 (views of one tensor, one token apart),
            domain [b] int64 (a position in ``data.domains``), and what ``boundaries`` make of the
            tokens: position_ids [b, s] int64, loss_mask [b, s] float32 and, where attention is
            kept within documents, document_starts [b, s] int64.

        Raises:
            UserError: if the tokens are damaged or outside of the vocabulary.
        """
        samples = np.asarray(indices, np.int64)
        domains, numbers = self.locate(samples)
        windows = torch.from_numpy(self._gather(domains, numbers))
        self._next_unread = max(self._next_unread, int(samples.max()) + 1)
        tokens, labels = windows[:, :-1], windows[:, 1:]
        return {
            "tokens": tokens,
            "labels": labels,
            **self._boundaries(tokens),
            "domain": torch.from_numpy(domains),
        }

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which domain [b] gives each of ``samples`` [b], and which of its own samples that is."""
        domains, numbers = np.empty_like(samples), np.empty_like(samples)
        starts = [phase.first for phase in self._phases]
        phases = np.searchsorted(starts, samples, side="right") - 1
        for number in np.unique(phases):
            here = phases == number
            domains[here], numbers[here] = self._phases[number].locate(samples[here])
        return domains, numbers

    def counts(self, samples: int) -> NDArray[np.int64]:
        """[num_domains] how many of the first ``samples`` samples each domain gives."""
        phase = self._phases[self.schedule.phase_at(max(samples - 1, 0))]
        return phase.counts(samples)

    def change_weights(self, first_sample: int, weights: Sequence[float]) -> None:
        """Draw by other weights from ``first_sample`` on. Every rank has to do the same.

        Raises:
            UserError: for weights that cannot be drawn by, or in Megatron's order.
            ValueError: if a sample from there on has been read already.
        """
        if first_sample < self._next_unread:
            raise ValueError(
                f"weights cannot change from sample {first_sample} on: samples up to "
                f"{self._next_unread} have been read"
            )
        schedule = self.schedule.changed(first_sample, weights)
        self._check(schedule)
        self._phases = self._blend(schedule)
        self.schedule = schedule
        self._open(self.counts(self._num_samples))

    def _check(self, schedule: MixtureSchedule) -> None:
        for phase in schedule.phases:
            check_weights(self.data, phase.weights)
            check_enough_tokens(self.data, phase.weights, self.seq_length)
        check_changes(schedule, self.permutation)

    def _blend(self, schedule: MixtureSchedule) -> list[_BlendedPhase]:
        phases: list[_BlendedPhase] = []
        before = np.zeros(len(self.data.domains), np.int64)
        for phase, length in schedule.spans(max(self._num_samples, 1)):
            phases.append(_BlendedPhase(phase, length, before, self._by_size))
            before = phases[-1].counts(phase.first_sample + length)
        return phases

    def _open(self, counts: NDArray[np.int64]) -> None:
        """Make the streams of the domains that give any samples and have none yet."""
        missing = [int(i) for i in np.flatnonzero(counts) if int(i) not in self._streams]
        threads = usable_threads()
        each = max(1, threads // max(1, len(missing)))
        streams = for_each(
            lambda domain: self._stream(domain, int(counts[domain]), each), missing, threads
        )
        self._streams.update(zip(missing, streams, strict=True))

    def _check_size(self) -> None:
        """Raises UserError for a run whose order takes too long to find, or too much memory."""
        if self._num_samples > MAX_SAMPLES:
            raise UserError(
                f"the run would read {self._num_samples:,} samples, more than {MAX_SAMPLES:,}; "
                "lower --train-iters or --global-batch-size"
            )
        if self.permutation == "megatron":
            weights = self.schedule.phases[0].weights
            total = sum(weights)
            needed = sum(
                megatron_index_bytes(
                    domain, math.ceil(self._num_samples * weight / total), self.seq_length
                )
                for domain, weight in zip(self.data.domains, weights, strict=True)
                if weight
            )
            require_host_memory(
                needed,
                f"Megatron's order of {self._num_samples:,} samples",
                "train on fewer, or choose --permutation feistel, which needs no memory",
            )

    def _stream(self, domain: int, count: int, num_threads: int) -> Stream:
        tokens = self.data.domains[domain]
        file = tokens.open()
        if self.permutation == "epoch":
            return EpochStream(tokens, file, self.seq_length, self._seed)
        if self.permutation == "feistel":
            return FeistelStream(tokens, file, self.seq_length, self._seed)
        num_samples = self._samples_built(domain, count)
        return MegatronStream(
            tokens, file, num_samples, self.seq_length, self._seed, self._cache, num_threads
        )

    def _samples_built(self, domain: int, count: int) -> int:
        """Of how many samples Megatron builds the order of a domain that gives ``count``.

        Data sets that are blended by size it builds for one whole epoch, whose order is that of any
        number of samples up to there; a data set alone, for what is asked of it.
        """
        if self._by_size:
            return count
        share = self._phases[0].shares[domain]
        built = math.ceil(math.ceil(self._num_samples * share) * (1 + MEGATRON_SURPLUS))
        # No domain is ever more than one sample ahead of its share, so that it gives no more than
        # the inner ceil; the surplus, one sample at least, is far above what rounding could add.
        assert count <= built
        return built

    def _gather(self, domains: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        table = self._table
        inside = (numbers >= table.first[domains]) & (numbers < table.stop[domains])
        if inside.all():
            return table.gather(domains, numbers, self.seq_length)
        # Some domain's next epoch begins within this batch, or nothing was read of it yet.
        pairs = zip(domains.tolist(), numbers.tolist(), strict=True)
        views = [self._view(domain, number) for domain, number in pairs]
        places = np.arange(len(views))
        return ViewTable(views).gather(places, numbers, self.seq_length)

    def _view(self, domain: int, number: int) -> View:
        """The view that holds a domain's sample, which stays at hand for the samples after it."""
        view = self._views.get(domain)
        if view is None or not view.first <= number < view.first + view.num_samples:
            view = self._streams[domain].view_of(number)
            self._views[domain] = view
            self._table.put(domain, view)
        return view


class _BlendedPhase:
    """The blended index of one phase, over the domains that it draws from.

    Left in, a domain of weight 0 would win ties. So would one whose weight is 0 beside the others
    in float64.

    Args:
        phase: weights, and the first sample that is drawn by them.
        length: samples of the phase.
        before: [num_domains] samples that each domain has given before.
        by_size: whether the weights are sizes.

    Attributes:
        shares: [num_domains] the weights, scaled once to sum to 1.
    """

    def __init__(self, phase: Phase, length: int, before: NDArray[np.int64], by_size: bool) -> None:
        weights = np.asarray(phase.weights, np.float64)
        self.first = phase.first_sample
        self._before = before
        given = np.flatnonzero(weights)
        scaled = np.zeros(len(weights))
        scaled[given] = normalize(weights[given].tolist())
        self.shares: list[float] = scaled.tolist()
        self._drawn = np.flatnonzero(scaled)
        # Weights are scaled twice, as Megatron does on the way from --data-path to its blended data
        # set: the second time may change the last bit, which decides ties.
        drawn = scaled[self._drawn].tolist()
        self._index = ImplicitBlendingIndices(drawn if by_size else normalize(drawn), length)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Domain and number within it of samples of this phase."""
        index, numbers = self._index.indices(samples - self.first)
        domains = self._drawn[index]
        return domains, numbers + self._before[domains]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """[num_domains] what each domain has given of the run's first ``samples`` samples."""
        counts = self._before.copy()
        counts[self._drawn] += self._index.counts(samples - self.first)
        return counts
