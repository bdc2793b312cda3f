"""The table of the weights of all mixtures, each with its intervals."""

from __future__ import annotations

from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import WeightColumns
from megatron_chameleon.report.text_tables import Cell, Table


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
