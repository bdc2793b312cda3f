"""Training samples of several domains, blended by a schedule of weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_chameleon.blend import order
from megatron_chameleon.blend.boundaries import document_boundaries
from megatron_chameleon.blend.megatron_order import MAX_DOMAINS, MegatronOrder
from megatron_chameleon.blend.options import DocumentBoundaryOptions, Permutation
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase, check_changes
from megatron_chameleon.blend.streams import View, epoch_view, megatron_view, read_ranges
from megatron_chameleon.corpus.domains import Domains
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.storage import concurrently

# Megatron's oversampling margin per blended dataset. It affects the number of whole epochs, and
# thereby the order.
MEGATRON_SURPLUS = 0.005


@dataclasses.dataclass(frozen=True)
class _BlendedPhase:
    """Order of the samples of one phase of the schedule.

    Attributes:
        phase: its first sample and constant weights; ramps have been divided into steps.
        order: order of the samples, which are numbered from the start of the phase.
        before: [num_domains] number of samples of each domain before the phase.
        target_before: [num_domains] target count of each domain before the phase.
    """

    phase: Phase
    order: order.BlendOrder | MegatronOrder
    before: NDArray[np.int64]
    target_before: NDArray[np.float64]

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's domain, and the sample's number within that domain."""
        domains, numbers = self.order.locate(samples - self.phase.first_sample)
        return domains, numbers + self.before[domains]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Count each domain's samples among the run's first ``samples``, [num_domains]."""
        return self.before + self.order.counts(samples - self.phase.first_sample)


class BlendedTokens(torch.utils.data.Dataset[Batch]):
    """The training samples of a run, in order, from domains blended by a schedule of weights.

    Every rank builds the data set independently from these arguments, without communication or
    shared storage. A domain is opened when one of its samples is first read, or by :meth:`open`.

    With ``permutation="megatron"`` the samples are those of Megatron's BlendedDataset over its
    GPTDatasets; the weights cannot change then, since Megatron's order depends on the number of
    samples. With "epoch" and "feistel" both the blend and the order within a domain are in closed
    form (see :mod:`megatron_chameleon.blend.order` and :mod:`megatron_chameleon.blend.streams`):
    no index is built, and the weights can change at any sample.

    Only one thread may read samples; others may call :meth:`counts` concurrently. Weights must not
    change while samples are being read.

    Args:
        data: token files of the domains.
        schedule: weights of the domains, in the order of ``data.domains``; scaled to sum to 1.
        num_samples: length of the data set.
        seq_length: tokens per sample (s); the labels are the same tokens, shifted by one.
        seed: seed of the order of documents and samples within each domain.
        permutation: order of a domain's samples.
        boundaries: position ids and masks at the ends of documents within a sample.
        cache: folder for Megatron's indices; None keeps them in memory only.
        by_size: whether the weights are data set sizes, which Megatron uses if no weights are
            passed. Megatron then normalizes them once instead of twice, and does not oversample.

    Raises:
        UserError: for invalid weights, a domain with too few tokens, or weights that change in
            Megatron's order.
    """

    def __init__(
        self,
        data: Domains,
        schedule: MixtureSchedule,
        num_samples: int,
        seq_length: int,
        seed: int,
        permutation: Permutation = "megatron",
        boundaries: DocumentBoundaryOptions | None = None,
        cache: Path | None = None,
        by_size: bool = False,
    ) -> None:
        self.data, self.schedule = data, schedule
        self.seq_length, self.permutation = seq_length, permutation
        self._num_samples, self._seed = num_samples, seed
        self._cache, self._by_size = cache, by_size
        self._boundaries = boundaries or DocumentBoundaryOptions()
        self._files: dict[int, TokenFile] = {}
        self._views: dict[int, View] = {}
        self._stepped = schedule  # constant weights in each phase; set by _blend
        self._phases: list[_BlendedPhase] = []
        self._next_unread = 0
        if num_samples > order.MAX_SAMPLES:
            raise UserError(
                f"the run would read {num_samples:,} samples, more than {order.MAX_SAMPLES:,}; "
                "lower --train-iters or --global-batch-size"
            )
        self._blend(schedule)

    def __len__(self) -> int:
        return self._num_samples

    @property
    def order_version(self) -> int:
        """Version of the order: with the same version, equal arguments give equal samples."""
        return 1 if self.permutation == "megatron" else order.VERSION

    def open(self) -> None:
        """Open all domains that are sampled, which checks their files.

        Raises:
            UserError: if files are missing, damaged, or have changed.
        """
        self._open(np.flatnonzero(self.counts(self._num_samples)).tolist())

    def __getitem__(self, index: int) -> Batch:
        """Return sample ``index``: the values of :meth:`batch` without their first dimension."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: part[0] for name, part in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read several samples at once, with one compiled call per domain.

        Returns:
            tokens [b, s] int64, labels [b, s] int64 (views of one tensor, one token apart),
            domain [b] int64 (an index into ``data.domains``), and the output of ``boundaries``:
            position_ids [b, s] int64, loss_mask [b, s] float32 and, with ``reset_attention_mask``,
            document_starts [b, s] int64.

        Raises:
            UserError: if files are missing or damaged, or hold tokens outside the vocabulary.
        """
        samples = np.asarray(indices, np.int64)
        domains, numbers = self.locate(samples)
        windows = np.empty((len(samples), self.seq_length + 1), np.int64)
        for domain, ranges in self._ranges(domains, numbers, np.arange(len(samples))):
            read_ranges(self._files[domain], ranges, windows)
        self._next_unread = max(self._next_unread, int(samples.max()) + 1)
        tokens = torch.from_numpy(windows)[:, :-1]
        return {
            "tokens": tokens,
            "labels": torch.from_numpy(windows)[:, 1:],
            **document_boundaries(tokens, self.data.tokenizer.eod_id, self._boundaries),
            "domain": torch.from_numpy(domains),
        }

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the domain [b] of each of ``samples`` [b], and its number within that domain.

        Raises:
            IndexError: for a sample beyond the end of the run.
        """
        lowest, highest = int(samples.min()), int(samples.max())
        if not 0 <= lowest <= highest < len(self):
            raise IndexError(f"samples {lowest} to {highest} of {len(self)}")
        first, last = self._stepped.phase_at(lowest), self._stepped.phase_at(highest)
        if first == last:
            return self._phases[first].locate(samples)
        domains, numbers = np.empty_like(samples), np.empty_like(samples)
        starts = [phase.phase.first_sample for phase in self._phases]
        phases = np.searchsorted(starts, samples, side="right") - 1
        for number in range(first, last + 1):
            here = phases == number
            domains[here], numbers[here] = self._phases[number].locate(samples[here])
        return domains, numbers

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Count each domain's samples among the first ``samples``, [num_domains]."""
        return self._phases[self._stepped.phase_at(max(samples - 1, 0))].counts(samples)

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        """Return what a checkpoint records after ``num_samples`` samples, by field of its record.

        A resumed run is built with the same schedule, and compares its counts with these.
        """
        names, counts = self.data.names, self.counts(num_samples).tolist()
        return {
            "samples": num_samples,
            "domain_samples": dict(zip(names, counts, strict=True)),
            "mixture_phases": self.schedule.record(num_samples, names),
            "order_version": self.order_version,
        }

    def change_weights(self, first_sample: int, weights: Sequence[float]) -> None:
        """Change the weights from ``first_sample`` on. Call it on every rank.

        Raises:
            UserError: for invalid weights, or in Megatron's order.
            ValueError: if ``first_sample`` or a later sample has already been read.
        """
        if first_sample < self._next_unread:
            raise ValueError(
                f"weights cannot change from sample {first_sample} on: samples up to "
                f"{self._next_unread} have been read"
            )
        schedule = self.schedule.changed(first_sample, weights)
        self._blend(schedule)
        self.schedule = schedule

    def _blend(self, schedule: MixtureSchedule) -> None:
        """Set the order of the phases of ``schedule``; phases that have not changed are reused."""
        check_changes(schedule, self.permutation)
        stepped = schedule.stepped()
        spans = list(stepped.spans(max(self._num_samples, 1)))
        phases: list[_BlendedPhase] = []
        for known, (phase, _) in zip(self._phases, spans, strict=False):
            if known.phase != phase:
                break  # a phase depends on all earlier phases
            phases.append(known)
        for phase, length in spans[len(phases) :]:
            check_weights(self.data, phase.weights)
            check_enough_tokens(self.data, phase.weights, self.seq_length)
            before = np.zeros(len(self.data.domains), np.int64)
            targets = np.zeros(len(self.data.domains))
            if phases:
                last, start = phases[-1], phase.first_sample
                before = last.counts(start)
                length_before = start - last.phase.first_sample
                targets = last.target_before + length_before * last.phase.shares
            blended: order.BlendOrder | MegatronOrder
            if self.permutation == "megatron":
                self._require_memory(phase.weights)
                blended = MegatronOrder(phase.weights, length, self._by_size)
            else:
                blended = order.BlendOrder(phase.weights, (targets - before).tolist())
            phases.append(_BlendedPhase(phase, blended, before, targets))
        self._stepped, self._phases = stepped, phases

    def _require_memory(self, weights: Sequence[float]) -> None:
        """Raise UserError if Megatron's indices of the blend and domains would exceed memory."""
        total, needed = sum(weights), MegatronOrder.BYTES_PER_SAMPLE * self._num_samples
        for domain, weight in zip(self.data.domains, weights, strict=True):
            if weight:
                samples = math.ceil(self._num_samples * (weight / total))
                num_epochs = -(-samples * self.seq_length // domain.tokens)
                # The document, sample and shuffle indices have entries of at least 32 bits.
                needed += 4 * num_epochs * domain.approximate_sequences + 12 * samples
        require_host_memory(
            needed,
            f"Megatron's order of {self._num_samples:,} samples",
            "train on fewer, or choose --permutation feistel, which needs no memory",
        )

    def _open(self, domains: Iterable[int]) -> None:
        """Open those of ``domains`` that are not open yet."""
        missing = [domain for domain in domains if domain not in self._files]
        if missing:
            files = concurrently(lambda domain: self.data.domains[domain].open(), missing)
            self._files.update(zip(missing, files, strict=True))

    def _build_megatron_views(self, domains: Iterable[int]) -> None:
        """Build Megatron's indices of those of ``domains`` that have none yet."""
        missing = [domain for domain in domains if domain not in self._views]
        if missing:
            counts = self.counts(self._num_samples)
            views = concurrently(lambda d: self._megatron_view(d, int(counts[d])), missing)
            self._views.update(zip(missing, views, strict=True))

    def _megatron_view(self, domain: int, count: int) -> View:
        # Megatron's order within a domain depends on the number of samples that it is built for.
        # When blending by size, Megatron builds one whole epoch; any smaller number of samples has
        # the same order. A single data set is built for its number of samples.
        built, blended = count, self._phases[0].order
        assert isinstance(blended, MegatronOrder)
        if not self._by_size:
            share = blended.shares[domain]
            built = math.ceil(math.ceil(self._num_samples * share) * (1 + MEGATRON_SURPLUS))
            # No domain is ever more than one sample ahead of its share, so the inner ceil is
            # enough. The surplus of at least one sample is far larger than any rounding error.
            assert count <= built
        data, file = self.data.domains[domain], self._files[domain]
        return megatron_view(data, file, built, self.seq_length, self._seed, self._cache)

    def token_ranges(self, samples: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """List the tokens that :meth:`batch` reads for ``samples`` [b], without reading them.

        Yields:
            A domain, and the token ranges of some of its samples, [r, 3] int64: sample, first token
            in the domain's .bin file, and number of tokens. The ranges of a sample follow each
            other, in the order of its tokens.

        Raises:
            IndexError: for a sample beyond the end of the run.
        """
        return self._ranges(*self.locate(samples), samples)

    def _ranges(
        self, domains: NDArray[np.int64], numbers: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield token ranges of samples, given their ``domains``, ``numbers`` and ``rows`` [b]."""
        sampled, size = np.unique(domains).tolist(), self.seq_length + 1
        self._open(sampled)
        if self.permutation == "megatron":
            self._build_megatron_views(sampled)
        for domain in sampled:
            left = np.flatnonzero(domains == domain)
            while len(left):
                view = self._views.get(domain)
                if view is None or not (inside := view.holds(numbers[left])).any():
                    # No view is open, or the open view covers another epoch.
                    view = self._epoch_view(domain, int(numbers[left[0]]))
                    self._views[domain], inside = view, view.holds(numbers[left])
                here, left = left[inside], left[~inside]
                yield domain, view.ranges(numbers[here], rows[here], size)

    def _epoch_view(self, domain: int, number: int) -> View:
        """Return a view of the epoch that contains sample ``number`` of a domain."""
        data, file, shuffle = (
            self.data.domains[domain],
            self._files[domain],
            self.permutation == "epoch",
        )
        return epoch_view(data, file, number, self.seq_length, self._seed, shuffle)


def check_enough_tokens(data: Domains, weights: Sequence[float], seq_length: int) -> None:
    """Check that every domain with a weight holds at least one sequence.

    Raises:
        UserError: if one does not; the message names the first such domain.
    """
    for domain, weight in zip(data.domains, weights, strict=True):
        if weight > 0 and domain.tokens < seq_length + 1:
            found, hint = f"has {domain.tokens} tokens to train on", "more text"
            if domain.is_cut:
                found = f"is cut to {domain.tokens} of its {domain.uncut_tokens:,} tokens"
                hint = "more training steps, a smaller --target-tokens"
            raise UserError(
                f"domain '{domain.name}' of {data.where} {found}, fewer than one sequence of "
                f"{seq_length}+1; use a shorter --seq-length, {hint}, or weight 0"
            )


def check_weights(data: Domains, weights: Sequence[float]) -> None:
    """Check that ``weights`` are valid sampling weights.

    Raises:
        UserError: unless there is one finite, non-negative weight per domain and at least one is
            positive.
    """
    if len(weights) != len(data.domains):
        raise UserError(
            f"{len(weights)} weights for the {len(data.domains)} domains of {data.where}; "
            "pass one per domain"
        )
    for name, weight in zip(data.names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"weight of '{name}' is {weight}; weights must be finite and >= 0")
    if np.count_nonzero(weights) > MAX_DOMAINS:
        raise UserError(
            f"{np.count_nonzero(weights)} domains of {data.where} have a weight above 0, but a "
            f"blend holds at most {MAX_DOMAINS}; set some weights to 0, or merge domains"
        )
    if not 0 < sum(weights) < math.inf:
        raise UserError("the weights must sum to a finite number above 0; scale them to sum to 1")
