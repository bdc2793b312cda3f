"""The tables of the ledger: what each stage cost, and what it took to obtain each mixture."""

from __future__ import annotations

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.report.ledger import Ledger, MixtureCost
from megatron_chameleon.report.run_folder import BASE, RunFolder
from megatron_chameleon.report.tables import format_flops, format_seconds
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

SECONDS_PER_HOUR = 3600.0
UNKNOWN = "unknown"


def cost_table(ledger: Ledger) -> Table:
    """What every artifact recorded, and the sum."""
    return Table(
        title="Cost",
        header=("stage", "FLOPs", "seconds", "device-seconds", "devices"),
        rows=tuple(
            (Cell(stage), *_cost_cells(cost), Cell(str(cost.num_devices)))
            for stage, cost in ledger.entries.items()
        ),
        summary=((Cell("total"), *_cost_cells(ledger.total), Cell("")),),
        notes=(
            "FLOPs are counted from the model's shapes; device-seconds are seconds times the "
            "devices (GPUs or CPU ranks) held.",
        ),
    )


def mixture_cost_table(ledger: Ledger, folder: RunFolder) -> Table:
    """For each mixture: FLOPs and device-hours with all that it was made from, and their ratios."""
    reference = ledger.mixtures[ledger.reference] if ledger.reference else None
    by_paper = any("paper_flops" in m.mixture.parameters for m in ledger.mixtures.values())
    header = ["mixture", "FLOPs", "device-hours"]
    if reference is not None:
        header += [f"FLOPs / {ledger.reference}", f"device-hours / {ledger.reference}"]
    if by_paper:
        header.append("FLOPs as the paper counts")
    rows = tuple(
        (
            Cell(name),
            *_sum_cells(mixture),
            *(_ratio_cells(mixture, reference) if reference else ()),
            *((Cell(_paper_flops(mixture)),) if by_paper else ()),
        )
        for name, mixture in ledger.mixtures.items()
    )
    return Table(
        title="Cost to obtain each mixture",
        header=tuple(header),
        rows=rows,
        notes=(_what_counts(by_paper), *_base_note(folder), *map(_incomplete, _lacking(ledger))),
    )


def format_hours(seconds: float) -> str:
    """Device-seconds as hours, to three digits; '-' for none."""
    hours = seconds / SECONDS_PER_HOUR
    if hours >= 100:
        return f"{hours:,.0f}"
    return f"{hours:.3g}" if hours else MISSING


def format_ratio(cost: float, reference: float) -> str:
    """A ratio like '11.6x', '-' where either is nothing."""
    if not cost or not reference:
        return MISSING
    ratio = cost / reference
    return f"{ratio:.2g}x" if ratio < 0.995 else f"{ratio:.1f}x"


def _cost_cells(cost: Cost) -> Row:
    texts = (
        format_flops(cost.flops),
        format_seconds(cost.wall_seconds),
        format_seconds(cost.device_seconds),
    )
    return tuple(Cell(text) for text in texts)


def _sum_cells(mixture: MixtureCost) -> Row:
    if not mixture.is_known:
        return Cell(UNKNOWN), Cell(UNKNOWN)
    cost = mixture.cost
    return Cell(format_flops(cost.flops)), Cell(format_hours(cost.device_seconds))


def _ratio_cells(mixture: MixtureCost, reference: MixtureCost) -> Row:
    """Ratios of sums; of a part of a sum there is none."""
    if not (mixture.is_known and reference.is_known):
        return Cell(MISSING), Cell(MISSING)
    cost, other = mixture.cost, reference.cost
    return (
        Cell(format_ratio(cost.flops, other.flops)),
        Cell(format_ratio(cost.device_seconds, other.device_seconds)),
    )


def _paper_flops(mixture: MixtureCost) -> str:
    return format_flops(float(mixture.mixture.parameters.get("paper_flops") or 0.0))


def _what_counts(by_paper: bool) -> str:
    text = (
        "With the proxies and embeddings that a mixture was made from. What several mixtures share "
        "counts for each of them here, and once in the total of the run."
    )
    paper = (
        " The paper counts 6 FLOPs per parameter and token trained, 2 per token embedded, without "
        "attention scores and output layer."
    )
    return text + (paper if by_paper else "")


def _base_note(folder: RunFolder) -> list[str]:
    """What the longest base run took, to see the mixtures' costs against."""
    if not folder.base_runs:
        return []
    name = max(folder.base_runs, key=lambda name: folder.base_runs[name].cost.flops)
    cost = folder.base_runs[name].cost
    return [
        f"Training {BASE}/{name} took {format_flops(cost.flops)} FLOPs and "
        f"{format_hours(cost.device_seconds)} device-hours."
    ]


def _lacking(ledger: Ledger) -> list[tuple[str, MixtureCost]]:
    return [(name, mixture) for name, mixture in ledger.mixtures.items() if mixture.missing]


def _incomplete(named: tuple[str, MixtureCost]) -> str:
    name, mixture = named
    is_recorded = "total_cost" in mixture.mixture.parameters
    rest = "; the sum that its file says is shown" if is_recorded else ""
    return f"Not found for {name}, and not counted: {', '.join(mixture.missing)}{rest}."
