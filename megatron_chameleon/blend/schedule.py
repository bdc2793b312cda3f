"""Mixture weights that may change during a run."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class Phase:
    """Weights [num_domains], not negative, that apply from sample ``first_sample`` on."""

    first_sample: int
    weights: tuple[float, ...]

    def targets(self, num_samples: int) -> NDArray[np.float64]:
        """Return target counts of ``num_samples`` samples of this phase, [num_domains]."""
        return num_samples * (np.array(self.weights) / math.fsum(self.weights))


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """The weights of every sample of a run: phases in order, the first one from sample 0 on.

    A change neither skips nor repeats samples of a domain.

    Raises:
        ValueError: unless the phases begin at 0, in increasing order, for the same number of
            domains.
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        starts = [phase.first_sample for phase in self.phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
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

    def phase_at(self, sample: int) -> int:
        """Index of the phase of ``sample``."""
        assert sample >= 0
        return bisect_right([phase.first_sample for phase in self.phases], sample) - 1

    def weights_at(self, sample: int) -> tuple[float, ...]:
        """The weights that apply to ``sample``."""
        return self.phases[self.phase_at(sample)].weights

    def changed(self, first_sample: int, weights: Sequence[float]) -> MixtureSchedule:
        """Return a copy with ``weights`` from ``first_sample`` on, without later phases.

        Raises:
            ValueError: if the sample is below 0, or the number of weights differs.
        """
        kept = tuple(phase for phase in self.phases if phase.first_sample < first_sample)
        return MixtureSchedule((*kept, Phase(first_sample, tuple(weights))))

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
        for phase, length in self.spans(num_samples):
            target += phase.targets(length)
        return list(target.tolist())


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
