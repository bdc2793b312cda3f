"""The weights of a run's mixtures and what they cost, with the paper's beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megatron_chameleon.report.comparison import Comparison, run_labels, same_weights
from megatron_chameleon.report.cost_tables import UNKNOWN, format_hours
from megatron_chameleon.report.ledger import MixtureCost, ledger_of
from megatron_chameleon.report.paper.columns import PAPER, TITLE, label_of
from megatron_chameleon.report.paper.published import cost_notes, sums_note, told_flops
from megatron_chameleon.report.paper.results import DataSet, source
from megatron_chameleon.report.paper.setting import PaperMatch
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import format_flops, format_weight
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

# Methods that the paper's columns call otherwise.
PAPER_METHODS = {"chameleon-pretrain": "chameleon"}


def weights_beside(match: PaperMatch, folder: RunFolder, comparison: Comparison | None) -> Table:
    """The distinct weights that the evaluated runs were trained with, and the paper's.

    Without evaluated runs they are those of all base runs; without these, all mixtures.
    """
    data_set = match.setting.data_set
    columns = data_set.weight_columns()
    mixtures: dict[str, Mapping[str, float]] = {}
    for label, weights in _weights_here(folder, comparison):
        if weights and not any(same_weights(weights, other) for other in mixtures.values()):
            mixtures[label] = weights
    rows = tuple(
        (
            Cell(name),
            *(Cell(format_weight(weights.get(name, 0.0))) for weights in mixtures.values()),
            *(Cell(format_weight(column.printed[paper])) for column in columns.values()),
        )
        for name, paper in match.names.items()
    )
    sums = [math.fsum(weights.values()) for weights in mixtures.values()]
    sums += [column.printed_sum for column in columns.values()]
    return Table(
        title=f"{TITLE}weights ({data_set.label})",
        header=("domain", *mixtures, *(f"{PAPER}{label_of(method)}" for method in columns)),
        rows=rows,
        summary=((Cell("sum"), *(Cell(format_weight(total)) for total in sums)),),
        notes=(f"The paper is {source()}; its weights are as printed.", *sums_note(data_set)),
    )


def _weights_here(
    folder: RunFolder, comparison: Comparison | None
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """What is trained or found here, with its label."""
    if comparison is not None:
        for run in comparison.runs:
            yield run.label, run.run.mixture if run.run else {}
    elif folder.base_runs:
        labels = run_labels(folder.base_runs, folder.base_runs)
        for name, trained in folder.base_runs.items():
            yield labels[name], trained.mixture
    else:
        for name, mixture in folder.mixtures.items():
            yield name, mixture.weights


def cost_beside(data_set: DataSet, folder: RunFolder) -> list[Table]:
    """What each mixture of the folder took, and what the paper prints of its method."""
    flops = data_set.flops()
    mixtures = ledger_of(folder).mixtures
    if not flops or not mixtures:
        return []
    methods = {name: _paper_method(cost, flops) for name, cost in mixtures.items()}
    rows = [
        (Cell(name), *_own_cost(cost), *_paper_cost(data_set, methods[name]))
        for name, cost in mixtures.items()
    ]
    rows += [
        (Cell(f"{label_of(method)} (not here)"), *[Cell()] * 3, *_paper_cost(data_set, method))
        for method in flops
        if method not in methods.values()
    ]
    table = Table(
        title=f"{TITLE}cost to obtain each mixture ({data_set.label})",
        header=(
            "mixture",
            "FLOPs",
            "device-hours",
            "FLOPs as the paper counts",
            f"{PAPER}FLOPs",
            f"{PAPER}H100 hours",
        ),
        rows=tuple(rows),
        notes=(
            f"The paper is {source()}. It counts 6 FLOPs per parameter and token trained, 2 per "
            "token embedded, without attention scores and output layer. Its hours are of H100 "
            "GPUs; the others are of the devices that these runs held.",
            *cost_notes(data_set),
        ),
    )
    return [table]


def _own_cost(cost: MixtureCost) -> Row:
    by_paper = Cell(format_flops(float(cost.mixture.parameters.get("paper_flops") or 0.0)))
    if not cost.is_known:
        return Cell(UNKNOWN), Cell(UNKNOWN), by_paper
    found = cost.cost
    return Cell(format_flops(found.flops)), Cell(format_hours(found.device_seconds)), by_paper


def _paper_cost(data_set: DataSet, method: str | None) -> Row:
    """What the paper prints for a method; '-' where it prints nothing."""
    if method is None:
        return Cell(), Cell()
    hours = data_set.gpu_hours.get(method)
    flops = data_set.flops().get(method)
    return Cell(told_flops(flops)), Cell(MISSING if hours is None else f"{hours:g}")


def _paper_method(cost: MixtureCost, known: Mapping[str, float]) -> str | None:
    method = PAPER_METHODS.get(cost.mixture.method, cost.mixture.method)
    return method if method in known else None
