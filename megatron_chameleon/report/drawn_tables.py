"""What training drew of each domain: tokens asked for and got, and the epochs that these are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from megatron_chameleon.artifacts import DrawnTokens, TrainingRun
from megatron_chameleon.report.comparison import BASELINE_METHOD, run_labels
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

# Of more groups than these, one table shows the extremes of each.
MOST_TABLES = 6
# Names of runs that a note lists; the others are counted.
MOST_NAMES = 12


@dataclasses.dataclass(frozen=True)
class DrawnAlike:
    """Runs of which the same tokens were asked for: seeds of one mixture.

    Attributes:
        label: what a table calls them.
        names: of the runs in 5-base.
        runs: these, at least one.
    """

    label: str
    names: tuple[str, ...]
    runs: tuple[TrainingRun, ...]

    @property
    def domains(self) -> list[str]:
        """In the order of the runs' corpus."""
        return list(self.runs[0].domain_tokens)

    def of(self, domain: str) -> list[DrawnTokens]:
        """What each run drew of ``domain``."""
        return [run.domain_tokens[domain] for run in self.runs]


def drawn_tables(folder: RunFolder) -> list[Table]:
    """Per base run and domain: tokens asked, tokens got, their difference and the epochs.

    Runs of the same method that were asked for the same tokens share a table, in which a figure
    that differs between them is a range. Beyond ``MOST_TABLES`` such groups, a single table has a
    row for each, with its largest difference and its most epochs.

    Args:
        folder: of the run; a base run that does not say what it drew is passed over.
    """
    groups = _groups(folder)
    if len(groups) > MOST_TABLES:
        return [_overview(groups)]
    return [_table(group) for group in groups]


def difference(drawn: DrawnTokens) -> float | None:
    """What was got above what was asked, as a share of the latter; None where that is nothing."""
    return (drawn.got - drawn.asked) / drawn.asked if drawn.asked else None


def _groups(folder: RunFolder) -> list[DrawnAlike]:
    """Base runs by what they were asked for, uniform ones first."""
    alike: dict[object, list[str]] = {}
    names = sorted(
        folder.base_runs, key=lambda n: folder.base_runs[n].mixture_method != BASELINE_METHOD
    )
    for name in names:
        run = folder.base_runs[name]
        if run.domain_tokens:
            asked = tuple((domain, drawn.asked) for domain, drawn in run.domain_tokens.items())
            alike.setdefault((run.mixture_method, asked), []).append(name)
    labels = run_labels(folder.base_runs, names)
    return [
        DrawnAlike(
            label=labels[same[0]]
            if len(same) == 1
            else f"{same[0]} and {len(same) - 1} more with the same weights",
            names=tuple(same),
            runs=tuple(folder.base_runs[name] for name in same),
        )
        for same in alike.values()
    ]


def _table(group: DrawnAlike) -> Table:
    drawn = [group.of(domain) for domain in group.domains]
    rows = tuple(
        (Cell(domain), *_cells(each)) for domain, each in zip(group.domains, drawn, strict=True)
    )
    totals = [_total(run) for run in group.runs]
    return Table(
        title=f"Tokens drawn: {group.label}",
        header=("domain", "tokens asked", "tokens got", "difference", "epochs"),
        rows=rows,
        summary=((Cell("total"), *_cells(totals)[:-1], Cell("")),),
        notes=(
            "Asked by the weights over all steps done; epochs are passes over the domain's "
            "training tokens.",
            *_notes([group]),
        ),
    )


def _overview(groups: Sequence[DrawnAlike]) -> Table:
    rows = tuple(
        (
            Cell(group.label),
            Cell(f"{_total(group.runs[0]).asked:,.0f}"),
            Cell(_extreme(group, difference, lambda share: f"{share:+.2%}")),
            Cell(_extreme(group, lambda drawn: drawn.epochs, format_epochs)),
        )
        for group in groups
    )
    return Table(
        title="Tokens drawn",
        header=("run", "tokens asked", "largest difference", "most epochs"),
        rows=rows,
        notes=(
            "Of each run the domain with the largest difference between tokens got and asked, and "
            "the one that was passed over most often. run.json of each run has all of them.",
            *_notes(groups),
        ),
    )


def format_epochs(epochs: float) -> str:
    """Passes over a domain, to three digits."""
    return f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.3g}"


def _cells(drawn: Sequence[DrawnTokens]) -> Row:
    """Of one domain in each run: asked, got, difference, epochs."""
    return (
        Cell(f"{drawn[0].asked:,.0f}"),
        Cell(_range((each.got for each in drawn), lambda got: f"{got:,.0f}")),
        Cell(_range(map(difference, drawn), lambda share: f"{share:+.2%}")),
        Cell(_range((each.epochs for each in drawn), format_epochs)),
    )


def _total(run: TrainingRun) -> DrawnTokens:
    """Of all domains of a run; its epochs mean nothing."""
    drawn = run.domain_tokens.values()
    asked = math.fsum(each.asked for each in drawn)
    return DrawnTokens(1.0, asked, sum(each.got for each in drawn), 0.0)


def _range(values: Iterable[float | None], told: Callable[[float], str]) -> str:
    """The smallest and the largest, or the one that they all are as told; '-' where one is None."""
    found = list(values)
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return MISSING
    low, high = told(min(known)), told(max(known))
    return low if low == high else f"{low} to {high}"


def _extreme(
    group: DrawnAlike, figure: Callable[[DrawnTokens], float | None], told: Callable[[float], str]
) -> str:
    """The figure that is farthest from 0 over all domains and runs, with its domain."""
    found = [
        (value, domain)
        for domain in group.domains
        for drawn in group.of(domain)
        if (value := figure(drawn)) is not None
    ]
    if not found:
        return MISSING
    value, domain = max(found, key=lambda pair: abs(pair[0]))
    return f"{told(value)} ({domain})"


def _notes(groups: Sequence[DrawnAlike]) -> list[str]:
    """Who shares a row or table, whose weights changed, and who is still training."""
    notes = []
    several = [group for group in groups if len(group.names) > 1]
    if several:
        listed = "; ".join(_names(group.names) for group in several)
        notes.append(f"Runs with the same weights, of which a range is shown: {listed}.")
    by_name = [pair for g in groups for pair in zip(g.names, g.runs, strict=True)]
    changed = [name for name, run in by_name if len(run.mixture_phases) > 1]
    if changed:
        notes.append(f"The weights changed during training: {_names(changed)}.")
    unfinished = [name for name, run in by_name if run.status != "finished"]
    if unfinished:
        notes.append(f"Training has not finished: {_names(unfinished)}.")
    return notes


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"
