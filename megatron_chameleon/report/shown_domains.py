"""Which domains a picture shows where there are more than can be read, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.report.curves import RunCurves

# Of panels of losses, and of groups of bars.
MOST_PANELS = 24
MOST_BARS = 60


def panel_domains(runs: Sequence[RunCurves]) -> list[str]:
    """The domains that a panel of losses is drawn of, in the order of the runs' records.

    Of more than ``MOST_PANELS`` those whose last losses differ most between the runs; where no two
    runs can be compared, the first.
    """
    names = _with_losses(runs)
    if len(names) <= MOST_PANELS:
        return names
    spread = {name: _spread(runs, name) for name in names}
    chosen = set(sorted(names, key=lambda name: -spread[name])[:MOST_PANELS])  # stable
    return [name for name in names if name in chosen]


def panels_told(runs: Sequence[RunCurves]) -> str:
    """A sentence on the domains that have no panel; empty where all have one."""
    names = _with_losses(runs)
    if len(names) <= MOST_PANELS:
        return ""
    if not any(_spread(runs, name) for name in names):
        return f" There are panels of the first {MOST_PANELS} of {len(names)} domains."
    return (
        f" There are panels of {MOST_PANELS} of {len(names)} domains: those whose last losses (of "
        "the running mean) differ most between the runs."
    )


def bar_domains(mixtures: Mapping[str, Mixture]) -> list[str]:
    """The domains that bars are drawn of, by falling weight in the first of ``mixtures``.

    Of more than ``MOST_BARS`` those with the largest weight in any mixture.
    """
    first = next(iter(mixtures.values()))
    largest: dict[str, float] = {}
    for mixture in mixtures.values():
        for name, weight in mixture.weights.items():
            largest[name] = max(weight, largest.get(name, 0.0))
    chosen = set(sorted(largest, key=lambda name: -largest[name])[:MOST_BARS])
    shown = [name for name in largest if name in chosen]
    return sorted(shown, key=lambda name: -first.weights.get(name, 0.0))


def count_of_domains(mixtures: Mapping[str, Mixture]) -> int:
    """How many domains have a weight in any of ``mixtures``."""
    return len({name for mixture in mixtures.values() for name in mixture.weights})


def bars_told(mixtures: Mapping[str, Mixture]) -> str:
    """A sentence on the domains that have no bar; empty where all have one."""
    count = count_of_domains(mixtures)
    if count <= MOST_BARS:
        return ""
    return (
        f" Of {count} domains the {MOST_BARS} with the largest weights in any mixture are drawn; "
        f"{count - MOST_BARS} are left out here and stand in the table."
    )


def _with_losses(runs: Sequence[RunCurves]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in (*run.domains, *run.validation)))


def _spread(runs: Sequence[RunCurves], name: str) -> float:
    """Highest less lowest last loss of the runs, in training or else on held-out text."""
    for curves in ([run.domains for run in runs], [run.validation for run in runs]):
        last = [float(found[name].smoothed().losses[-1]) for found in curves if name in found]
        last = [loss for loss in last if math.isfinite(loss)]
        if len(last) > 1:
            return max(last) - min(last)
    return 0.0
