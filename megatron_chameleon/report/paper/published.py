"""The paper's tables by themselves, with averages and counts worked out from their rows."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_chameleon.report.cost_tables import format_ratio
from megatron_chameleon.report.paper.columns import (
    ACCURACY,
    PERPLEXITY,
    Kind,
    count_cells,
    disagreements,
    label_of,
    recomputed_note,
)
from megatron_chameleon.report.paper.results import DataSet, PaperTable, Setting, source
from megatron_chameleon.report.tables import format_flops
from megatron_chameleon.report.text_tables import MISSING, Cell, Table

# The paper divides the costs of the others by Chameleon's.
REFERENCE = "chameleon"
# Sums of printed weights are told where they are not 1.000.
SUM_UNIT = 5e-4


def published_tables(setting: Setting) -> list[Table]:
    """Perplexity, downstream accuracy, weights and cost, as the paper has them for ``setting``.

    What is not printed has no table. Averages, counts, sums and ratios are worked out from the
    rows, and a note tells where the paper prints another figure.
    """
    tables = [
        _results(setting, setting.perplexity, table, PERPLEXITY) for table in setting.perplexity
    ]
    tables += [
        _results(setting, setting.downstream, table, ACCURACY) for table in setting.downstream
    ]
    cost = _cost(setting)
    return [*tables, _weights(setting), *([] if cost is None else [cost])]


def sums_note(data_set: DataSet) -> list[str]:
    """Which printed columns of weights do not sum to 1."""
    sums = {method: column.printed_sum for method, column in data_set.weight_columns().items()}
    odd = [f"{label_of(m)} {total:.4f}" for m, total in sums.items() if abs(total - 1) > SUM_UNIT]
    if not odd:
        return []
    return [f"Printed weights that do not sum to 1: {', '.join(odd)}; to use them, divide by it."]


def told_flops(flops: float | None) -> str:
    """FLOPs as printed: 0 where that is printed, '-' where nothing is."""
    return MISSING if flops is None else "0" if flops == 0 else format_flops(flops)


def cost_notes(data_set: DataSet) -> list[str]:
    """What else the paper says of costs on a data set."""
    notes = []
    if data_set.name == "pile":
        notes.append(
            "On the Pile the FLOPs are extra ones: Chameleon has its proxy from SlimPajama, the "
            "others train new ones."
        )
    if data_set.doge_step_ratio is not None:
        notes.append(
            f"A step of DoGE's proxy took about {data_set.doge_step_ratio:g} times the wall-clock "
            "time of a plain one."
        )
    notes += [
        f"Training the base model of {size} took {hours:g} H100 hours."
        for size, hours in data_set.base_gpu_hours.items()
    ]
    return notes


def _results(
    setting: Setting, tables: tuple[PaperTable, ...], table: PaperTable, kind: Kind
) -> Table:
    """One printed table; the baseline's column may stand in the first of ``tables`` alone."""
    reference = tables[0]
    columns = table.columns
    rows = table.rows
    average = kind.cells([column.average_of(rows) for column in columns.values()])
    counts = count_cells(kind, columns, setting.baseline, reference, rows)
    better = f"{kind.counted} better than {label_of(setting.baseline)}"
    unit = "perplexity" if kind is PERPLEXITY else "accuracy in percent, mean over 0 to 5 shots"
    return Table(
        title=f"{setting.label}: {table.caption}",
        header=(kind.counted.removesuffix("s"), *map(label_of, columns)),
        rows=tuple(
            (Cell(row), *kind.cells([column.printed[row] for column in columns.values()]))
            for row in rows
        ),
        summary=((Cell("average"), *average), (Cell(better), *counts)),
        notes=(
            f"{source()}: {unit}. The best of each row is marked.",
            recomputed_note(disagreements(kind, table, setting.baseline, reference)),
        ),
    )


def _weights(setting: Setting) -> Table:
    columns = setting.data_set.weight_columns()
    domains = list(next(iter(columns.values())).printed)
    sums = (Cell(f"{column.printed_sum:.4f}") for column in columns.values())
    captions = dict.fromkeys(column.table for column in columns.values())
    return Table(
        title=f"{setting.data_set.label}: {', '.join(captions)}",
        header=("domain", *map(label_of, columns)),
        rows=tuple(
            (Cell(name), *(Cell(f"{c.printed[name]:.4f}") for c in columns.values()))
            for name in domains
        ),
        summary=((Cell("sum"), *sums),),
        notes=(f"{source()}: weights as printed.", *sums_note(setting.data_set)),
    )


def _cost(setting: Setting) -> Table | None:
    data_set = setting.data_set
    flops, hours = data_set.flops(), data_set.gpu_hours
    if not flops:
        return None
    methods = dict.fromkeys([*flops, *hours])
    return Table(
        title=f"{data_set.label}: cost to obtain the weights",
        header=("method", "FLOPs", "FLOPs / Chameleon", "H100 hours", "hours / Chameleon"),
        rows=tuple(
            (
                Cell(label_of(method)),
                Cell(told_flops(flops.get(method))),
                _ratio(flops, method),
                Cell(f"{hours[method]:g}" if method in hours else MISSING),
                _ratio(hours, method),
            )
            for method in methods
        ),
        notes=(
            f"{source()}: as printed, the ratios worked out from it.",
            *cost_notes(data_set),
        ),
    )


def _ratio(figures: Mapping[str, float], method: str) -> Cell:
    if method not in figures or REFERENCE not in figures:
        return Cell(MISSING)
    return Cell(format_ratio(figures[method], figures[REFERENCE]))
