"""Held-out perplexity by method, where methods were trained with several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_chameleon.report.comparison import Comparison
from megatron_chameleon.report.seeds import SeedGroup, Spread, seed_groups
from megatron_chameleon.report.tables import format_spread
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table


def seed_table(comparison: Comparison) -> Table | None:
    """Per domain the mean of every method over its seeds, ± their standard deviation.

    None where no method has several seeds: the table of all runs says the same.
    """
    groups = seed_groups(comparison)
    if all(len(group.runs) == 1 for group in groups):
        return None
    rows = [
        (Cell(name), *_cells([group.perplexity_of(name) for group in groups]))
        for name in comparison.domains
    ]
    rows += [(Cell(name), *[Cell()] * len(groups)) for name in comparison.left_out]
    summary = [(Cell("average"), *_cells([group.perplexity for group in groups]))]
    if comparison.baseline is not None and len(groups) > 1:
        summary.append(_domains_better(comparison, groups))
    return Table(
        title="Held-out perplexity over seeds",
        header=("domain", *(f"perplexity {group.label}" for group in groups)),
        rows=tuple(rows),
        summary=tuple(summary),
        notes=(_seeds_told(groups),),
    )


def _cells(spreads: Sequence[Spread]) -> Row:
    """Cells of one row; the lowest mean is marked if it is finite and has something beside it."""
    finite = [spread.mean for spread in spreads if math.isfinite(spread.mean)]
    lowest = min(finite) if finite and len(spreads) > 1 else None
    return tuple(Cell(format_spread(spread), best=spread.mean == lowest) for spread in spreads)


def _domains_better(comparison: Comparison, groups: Sequence[SeedGroup]) -> Row:
    reference, *others = groups
    counts = (
        Cell(f"{group.domains_better(reference)} of {len(comparison.domains)}") for group in others
    )
    return (Cell(f"domains better than {reference.label}"), Cell(MISSING), *counts)


def _seeds_told(groups: Sequence[SeedGroup]) -> str:
    listed = ", ".join(f"{group.label} {len(group.runs)}" for group in groups)
    return f"Means over seeds ± the standard deviation over seeds; seeds: {listed}."
