"""Evaluated runs that differ by their seed alone, as one method: its mean and how far it spreads.

Chance in training is of another kind than the standard error of one run, which is that of another
draw of held-out text: only further seeds show it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence

from megatron_chameleon.report.comparison import Comparison, Evaluated, run_labels, same_weights
from megatron_chameleon.report.names import unique_labels

# As examples/compare_methods.sh and the guides name base runs: METHOD-seed1.
_SEED = re.compile(r"-seed(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of ``count`` figures, one for each seed: their mean and standard deviation.

    ``deviation`` is the sample's, with count - 1 below; None of one figure, and where a figure is
    infinite.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Of at least one figure."""
        known = len(figures) > 1 and all(map(math.isfinite, figures))
        deviation = statistics.stdev(figures) if known else None
        return cls(sum(figures) / len(figures), deviation, len(figures))


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs with the same weights whose names differ by their seed alone; or one other run.

    Attributes:
        label: the run's own where there is one; otherwise its method, or the name without seed.
        runs: by their seeds.
    """

    label: str
    runs: tuple[Evaluated, ...]

    @property
    def perplexity(self) -> Spread:
        """Of the runs' average perplexities."""
        return Spread.of([run.result.mean_perplexity for run in self.runs])

    def less(self, other: SeedGroup) -> Spread | None:
        """Average perplexity less that of ``other`` with the same seed; None of no such pair."""
        theirs = {seed_of(run.name): run.result.mean_perplexity for run in other.runs}
        pairs = [
            (run.result.mean_perplexity, theirs[seed])
            for run in self.runs
            if (seed := seed_of(run.name)) is not None and seed in theirs
        ]
        finite = [mine - other for mine, other in pairs if math.isfinite(mine - other)]
        return Spread.of(finite) if finite else None

    def domains_better(self, other: SeedGroup) -> int:
        """In how many domains the mean perplexity over seeds is below that of ``other``."""
        names = self.runs[0].result.domains
        pairs = ((self.perplexity_of(name), other.perplexity_of(name)) for name in names)
        return sum(mine.mean < theirs.mean for mine, theirs in pairs)

    def perplexity_of(self, domain: str) -> Spread:
        """Of the runs' perplexities of one domain."""
        return Spread.of([run.result.domains[domain].perplexity for run in self.runs])


def seed_of(name: str) -> int | None:
    """The seed that a run is named after; None where its name has none."""
    found = _SEED.search(name)
    return None if found is None else int(found[1])


def seed_groups(comparison: Comparison) -> list[SeedGroup]:
    """Every evaluated run in one group, the baseline's first."""
    groups: list[list[Evaluated]] = []
    for run in comparison.runs:
        group = next((each for each in groups if _is_another_seed(run, each[0])), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    labels = _labels(groups)
    return [
        SeedGroup(label, tuple(sorted(group, key=lambda run: seed_of(run.name) or 0)))
        for label, group in zip(labels, groups, strict=True)
    ]


def _is_another_seed(run: Evaluated, other: Evaluated) -> bool:
    if seed_of(run.name) is None or run.run is None or other.run is None:
        return False
    return _stem(run) == _stem(other) and same_weights(run.run.mixture, other.run.mixture)


def _stem(run: Evaluated) -> str:
    """The name without its seed."""
    return _SEED.sub("-seed", run.name, count=1)


def _labels(groups: Sequence[Sequence[Evaluated]]) -> list[str]:
    """Of each group; that of several runs is their method where no other group has it."""
    first = {group[0].name: group[0] for group in groups}
    methods = run_labels({n: run.run for n, run in first.items() if run.run is not None}, first)
    found = {}
    for group in groups:
        name, own = group[0].name, group[0].label
        if len(group) > 1:
            own = methods[name] if methods[name] != name else _SEED.sub("", name, count=1)
        found[name] = own
    return list(unique_labels(found).values())
