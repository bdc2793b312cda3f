"""Mixture weights that may change during a run."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import MixturePhase
from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.errors import UserError
from megatron_chameleon.mixture.weights import capped_weights

# Most steps that stand for a ramp. With 1,000 domains, so many steps take 100 MB and about 10
# seconds; see :meth:`MixtureSchedule.stepped` for the accuracy.
MAX_RAMP_STEPS = 2048


@dataclasses.dataclass(frozen=True)
class Phase:
    """Weights [num_domains], not negative, that apply from sample ``first_sample`` on.

    Within the first ``ramp_samples`` samples of the phase, the domains' shares of the samples
    change linearly from those in force before the phase to those of ``weights``.
    """

    first_sample: int
    weights: tuple[float, ...]
    ramp_samples: int = 0

    @property
    def shares(self) -> NDArray[np.float64]:
        """The weights, scaled to sum to 1, [num_domains]."""
        return np.array(self.weights) / math.fsum(self.weights)

    @property
    def ramp_end(self) -> int:
        """The first sample with constant weights."""
        return self.first_sample + self.ramp_samples

    def shares_after(self, samples: float, start: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the shares ``samples`` after the phase began with the shares ``start``."""
        progress = min(samples / self.ramp_samples, 1.0) if self.ramp_samples else 1.0
        return (1.0 - progress) * start + progress * self.shares


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """The weights of every sample of a run: phases in order, the first one from sample 0 on.

    A change neither skips nor repeats samples of a domain.

    Raises:
        ValueError: unless the phases begin at 0, without a ramp, in increasing order, for the same
            number of domains. A ramp may begin at the same sample as the phase before it.
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        starts = [phase.first_sample for phase in self.phases]
        increasing = all(
            after.first_sample > before.first_sample - bool(after.ramp_samples)
            for before, after in pairwise(self.phases)
        )
        if starts[:1] != [0] or self.phases[0].ramp_samples or not increasing:
            raise ValueError(f"phases begin at {starts}: must be increasing from 0")
        sizes = {len(phase.weights) for phase in self.phases}
        if len(sizes) != 1:
            raise ValueError(
                f"phases have weights for {sorted(sizes)} domains: must be the same number"
            )

    @classmethod
    def fixed(cls, weights: Sequence[float]) -> MixtureSchedule:
        """Return a schedule that never changes its weights."""
        return cls((Phase(0, tuple(weights)),))

    @classmethod
    def from_record(cls, phases: Iterable[MixturePhase], names: Sequence[str]) -> MixtureSchedule:
        """Return the schedule of recorded ``phases``; the inverse of :meth:`record`.

        Raises:
            KeyError: if a phase has no weight of one of the domains ``names``.
            ValueError: if the phases form no schedule.
        """
        return cls(
            tuple(
                Phase(p.first_sample, tuple(p.weights[name] for name in names), p.ramp_samples)
                for p in phases
            )
        )

    def record(self, num_samples: int, names: Sequence[str]) -> list[MixturePhase]:
        """Return the phases that begin within the first ``num_samples`` samples, to record them."""
        return [
            MixturePhase(
                phase.first_sample,
                dict(zip(names, phase.weights, strict=True)),
                phase.ramp_samples,
            )
            for phase in self.until(num_samples)
        ]

    def phase_at(self, sample: int) -> int:
        """Index of the phase of ``sample``."""
        assert sample >= 0
        return bisect_right(self.phases, sample, key=lambda phase: phase.first_sample) - 1

    def weights_at(self, sample: int) -> tuple[float, ...]:
        """The weights that apply to ``sample``; within a ramp, those in the middle of the sample.

        In this way, the sum over samples is the integral of a ramp.
        """
        index = self.phase_at(sample)
        phase = self.phases[index]
        if sample >= phase.ramp_end:
            return phase.weights
        shares = phase.shares_after(sample + 0.5 - phase.first_sample, self._start_shares()[index])
        return tuple(shares.tolist())

    def changed(self, first_sample: int, weights: Sequence[float]) -> MixtureSchedule:
        """Return a copy with ``weights`` from ``first_sample`` on, without later phases.

        Raises:
            ValueError: if the sample is below 0, or the number of weights differs.
        """
        kept = tuple(phase for phase in self.phases if phase.first_sample < first_sample)
        return MixtureSchedule((*kept, Phase(first_sample, tuple(weights))))

    def ramp(self, first_sample: int, end: int, weights: Sequence[float]) -> MixtureSchedule:
        """Return a copy that reaches ``weights`` at sample ``end``, linearly from ``first_sample``.

        Raises:
            ValueError: unless the ramp begins at or after the last phase and is at least one sample
                long, or if the number of weights differs.
        """
        return MixtureSchedule(
            (*self.phases, Phase(first_sample, tuple(weights), end - first_sample))
        )

    def stepped(self) -> MixtureSchedule:
        """Return the schedule with constant weights in every phase: steps stand for ramps.

        Each step has the ramp's mean shares, so that target counts are those of the ramp at both
        ends of a step. If the share of a domain changes by c in a ramp of n samples, target counts
        within one of k equal steps differ from the ramp's by at most ``c n / (8 k^2)`` samples. The
        steps are so many that this is 1/4, unless ``MAX_RAMP_STEPS`` limits them (for c = 1, from
        8.4 million samples on).
        """
        if not any(phase.ramp_samples for phase in self.phases):
            return self  # online methods add thousands of phases, one by one
        phases: list[Phase] = []
        for phase, start in zip(self.phases, self._start_shares(), strict=True):
            while phases and phases[-1].first_sample >= phase.first_sample:
                phases.pop()
            change = float(np.abs(phase.shares - start).max())
            steps = math.ceil(math.sqrt(change * phase.ramp_samples / 2))
            steps = min(max(steps, 1), MAX_RAMP_STEPS, phase.ramp_samples)
            ends = [phase.ramp_samples * step // max(steps, 1) for step in range(steps + 1)]
            for before, end in pairwise(ends):
                shares = phase.shares_after((before + end) / 2, start)
                phases.append(Phase(phase.first_sample + before, tuple(shares.tolist())))
            phases.append(Phase(phase.ramp_end, phase.weights))
        return MixtureSchedule(tuple(phases))

    def until(self, sample: int) -> tuple[Phase, ...]:
        """The phases that begin before ``sample``."""
        return tuple(phase for phase in self.phases if phase.first_sample < max(sample, 1))

    def spans(self, num_samples: int) -> Iterator[tuple[Phase, int]]:
        """Yield each phase that begins before ``num_samples``, and its length up to that sample."""
        started = [phase for phase in self.phases if phase.first_sample < num_samples]
        ends = [*(phase.first_sample for phase in started[1:]), num_samples]
        for phase, end in zip(started, ends, strict=False):  # no phase starts before sample 0
            yield phase, end - phase.first_sample

    def target_samples(self, num_samples: int) -> list[float]:
        """Return target counts of the first ``num_samples`` samples, [num_domains]."""
        target = np.zeros(len(self.phases[0].weights))
        for index, (phase, length) in enumerate(self.spans(num_samples)):
            ramp = min(length, phase.ramp_samples)
            if ramp:  # linear: the middle is the mean
                target += ramp * phase.shares_after(ramp / 2, self._start_shares()[index])
            target += (length - ramp) * phase.shares
        return list(target.tolist())

    def limited(self, caps: Sequence[float], num_samples: int) -> MixtureSchedule:
        """Return the nearest schedule whose target counts of ``num_samples`` are within ``caps``.

        A domain with the target n_i and the cap c_i may have at most c_i / n_i times its share in
        each phase; :func:`capped_weights` distributes the rest of the phase over the other domains
        in proportion to their shares. Later phases are unchanged.

        Args:
            caps: [num_domains] most samples of each domain; infinity for no cap.
            num_samples: number of samples of the run.

        Raises:
            ValueError: if the domains of a phase cannot fill it within their caps.
        """
        assert not any(phase.ramp_samples for phase in self.phases)
        targets = np.array(self.target_samples(num_samples))
        if (targets <= caps).all():
            return self
        ratios = np.divide(caps, targets, out=np.ones_like(targets), where=targets > 0)
        phases = list(self.phases)
        for index, (phase, _) in enumerate(self.spans(num_samples)):
            most = np.multiply(
                phase.shares, ratios, out=np.zeros(len(ratios)), where=phase.shares > 0
            )
            weights = capped_weights(phase.shares, most)
            phases[index] = dataclasses.replace(phase, weights=tuple(weights.tolist()))
        return MixtureSchedule(tuple(phases))

    def _start_shares(self) -> list[NDArray[np.float64]]:
        """The shares in force when each phase begins, [num_phases] of [num_domains]."""
        starts = [self.phases[0].shares]
        for before, phase in pairwise(self.phases):
            starts.append(before.shares_after(phase.first_sample - before.first_sample, starts[-1]))
        return starts


def check_ramps(schedule: MixtureSchedule, samples_per_step: int) -> None:
    """Check that no change begins before an earlier ramp has ended.

    Raises:
        UserError: if a change does; the message names both by their steps.
    """
    for before, after in pairwise(schedule.phases):
        first, end, step = (
            sample // samples_per_step
            for sample in (before.first_sample, before.ramp_end, after.first_sample)
        )
        if before.ramp_samples and after.first_sample < before.ramp_end:
            raise UserError(
                f"--mixture-change: the change at step {step} overlaps the change {first}..{end}; "
                f"begin the later one at step {end} or later"
            )


def check_changes(schedule: MixtureSchedule, permutation: Permutation) -> None:
    """Check that the sample order permits changes of the weights.

    Raises:
        UserError: if there are changes and the order is Megatron's.
    """
    if permutation == "megatron" and len(schedule.phases) > 1:
        raise UserError(
            "Megatron's order of samples requires constant weights; for weights that "
            "change, start the run with --permutation epoch or feistel"
        )
