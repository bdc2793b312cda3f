"""The tables of weights: of all mixtures, and of those for fine-tuning beside their partners."""

from __future__ import annotations

from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import WeightColumns, fine_tuning_pairs, fine_tuning_tables
from megatron_chameleon.report.text_tables import Cell, Table


def weight_tables(folder: RunFolder) -> list[Table]:
    """The table of all mixtures, unless each stands in one for fine-tuning, and the latter."""
    pairs = fine_tuning_pairs(folder)
    shown = {name for pair in pairs for name in (pair.name, pair.partner)}
    table = None if folder.mixtures.keys() <= shown else weights_table(folder)
    return [*([] if table is None else [table]), *fine_tuning_tables(folder)]


def weights_table(folder: RunFolder) -> Table | None:
    """A row per domain, and for each mixture its weight and interval; None without mixtures."""
    if not folder.mixtures:
        return None
    columns = [WeightColumns(name, m.weights, m) for name, m in folder.mixtures.items()]
    names = dict.fromkeys(name for m in folder.mixtures.values() for name in m.weights)
    return Table(
        title="Weights of each mixture",
        header=("domain", *(heading for column in columns for heading in column.header())),
        rows=tuple(
            (Cell(name), *(cell for column in columns for cell in column.cells(name)))
            for name in names
        ),
        notes=("Shares of training tokens.", *_methods(folder)),
    )


def _methods(folder: RunFolder) -> list[str]:
    """By which method each mixture was found that has another name."""
    told = [f"{n}: {m.method}" for n, m in folder.mixtures.items() if m.method and m.method != n]
    return [f"Methods: {', '.join(told)}."] if told else []
