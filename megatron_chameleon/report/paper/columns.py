"""What the paper's columns look like in a table: cells, averages, counts, and what disagrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from megatron_chameleon.report.paper.results import LABELS, PaperColumn, PaperTable
from megatron_chameleon.report.tables import format_perplexity
from megatron_chameleon.report.text_tables import MISSING, Cell, Row

# Before the titles of tables with columns of both, and before the headings of the paper's.
TITLE, PAPER = "Beside the paper: ", "paper: "


@dataclasses.dataclass(frozen=True)
class Kind:
    """Perplexities or accuracies: how they are told, which is better, and how exact print is.

    Attributes:
        unit: the last place that rows and averages are printed to.
        told: a figure as text.
        best: picks the best of some.
        counted: what is counted in the row 'counted better than the baseline'.
    """

    unit: float
    told: Callable[[float], str]
    best: Callable[[Sequence[float]], float]
    counted: str

    def is_better(self, one: float, other: float) -> bool:
        """Whether ``one`` is better than ``other``, and not as good."""
        return one != other and self.best([one, other]) == one

    def cells(self, figures: Sequence[float | None]) -> Row:
        """Of a group of columns; the best is marked if there is something to compare it with."""
        known = [figure for figure in figures if figure is not None]
        best = self.best(known) if len(known) > 1 else None
        return tuple(Cell() if f is None else Cell(self.told(f), best=f == best) for f in figures)


PERPLEXITY = Kind(0.01, format_perplexity, min, "domains")
ACCURACY = Kind(0.1, lambda percent: f"{percent:.1f}", max, "tasks")


def label_of(method: str) -> str:
    """The heading of a method's column."""
    return LABELS.get(method, method)


def better_than(kind: Kind, column: PaperColumn, baseline: PaperColumn, rows: Sequence[str]) -> int:
    """In how many of ``rows`` the column is better than the baseline's, from the rows."""
    return sum(kind.is_better(column.printed[row], baseline.printed[row]) for row in rows)


def count_cells(
    kind: Kind,
    columns: Mapping[str, PaperColumn],
    baseline: str,
    reference: PaperTable,
    rows: Sequence[str],
) -> Row:
    """'4 of 7' for each column, '-' for the baseline itself, whose column is in ``reference``."""
    return tuple(
        Cell(MISSING)
        if method == baseline
        else Cell(f"{better_than(kind, column, reference.columns[baseline], rows)} of {len(rows)}")
        for method, column in columns.items()
    )


def disagreements(kind: Kind, table: PaperTable, baseline: str, reference: PaperTable) -> list[str]:
    """The printed averages and counts that do not follow from the printed rows, in words.

    Rows are rounded, and so is the average: what rounding explains is no disagreement.

    Args:
        kind: of the figures.
        table: whose columns are looked at.
        baseline: the method that they are counted against.
        reference: the table that has the baseline's column.
    """
    found = []
    for method, column in table.columns.items():
        average = column.average_of(table.rows)
        if abs(average - column.average) > kind.unit + 1e-9:
            found.append(
                f"average of {label_of(method)} {kind.told(column.average)} "
                f"(its rows: {kind.told(average)})"
            )
        if column.better is None:
            continue
        better = better_than(kind, column, reference.columns[baseline], table.rows)
        if better != column.better:
            found.append(
                f"{kind.counted} in which {label_of(method)} is better than {label_of(baseline)} "
                f"{column.better} (its rows: {better})"
            )
    return found


def recomputed_note(found: Sequence[str]) -> str:
    """The footnote of a table whose averages and counts are from the rows."""
    note = "The paper's averages and counts are worked out from its rows."
    return (
        note if not found else f"{note} Beyond rounding, it prints otherwise: {'; '.join(found)}."
    )
