"""The tables of a head-to-head: mixtures, perplexity and cost in one, and perplexity by domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_chameleon.report.head_to_head.compare import HeadToHead
from megatron_chameleon.report.head_to_head.words import notes
from megatron_chameleon.report.tables import format_flops, format_perplexity, format_weight
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

UNKNOWN = "unknown"


def comparison_table(compared: HeadToHead) -> Table:
    """A column per mixture: weights, average perplexity over seeds, and what it cost to find."""
    return Table(
        title="Mixtures head to head",
        header=("weight of", *(c.label for c in compared.contestants)),
        rows=tuple(
            row(name, (format_weight(c.mixture.weights.get(name, 0.0)) for c in compared))
            for name in compared.domains
        ),
        summary=(*_perplexity_rows(compared), *_cost_rows(compared)),
        notes=notes(compared),
    )


def domain_table(compared: HeadToHead) -> Table:
    """Per domain: the mean of its perplexity over seeds, and its standard deviation."""
    means = compared.perplexities.mean(axis=1)
    deviations = compared.perplexities.std(axis=1, ddof=1)
    return Table(
        title="Held-out perplexity by domain",
        header=("domain", *(c.label for c in compared.contestants)),
        rows=tuple(
            row(
                name,
                map(with_deviation, means[:, k], deviations[:, k]),
                best=means[:, k] == means[:, k].min(),
            )
            for k, name in enumerate(compared.domains)
        ),
        notes=("Mean over seeds ± standard deviation; the lowest mean of each row is marked.",),
    )


def with_deviation(mean: float, deviation: float) -> str:
    """Like "251.51 ± 3.20"."""
    return f"{format_perplexity(mean)} ± {format_perplexity(deviation)}"


def format_multiple(multiple: float | None) -> str:
    """Like "9.8x"; '-' where there is none."""
    if multiple is None:
        return MISSING
    return f"{multiple:.2f}x" if multiple < 10 else f"{multiple:.1f}x"


def row(
    name: str,
    texts: Iterable[str],
    left_out: Sequence[bool] | None = None,
    best: Iterable[bool] | None = None,
) -> Row:
    """A row of a table; cells that are ``left_out`` say nothing, ``best`` ones are marked."""
    shown = list(texts)
    hidden = left_out if left_out is not None else [False] * len(shown)
    marked = [bool(b) for b in best] if best is not None else [False] * len(shown)
    cells = (
        Cell() if is_hidden else Cell(text, is_best)
        for text, is_hidden, is_best in zip(shown, hidden, marked, strict=True)
    )
    return (Cell(name), *cells)


def _perplexity_rows(compared: HeadToHead) -> tuple[Row, ...]:
    baseline, averages = compared.baseline, compared.averages
    means, deviations = averages.mean(axis=1), averages.std(axis=1, ddof=1)
    gaps = [compared.difference(c, baseline) for c in compared]
    is_baseline = [c is baseline for c in compared]
    better = (f"{compared.domains_better(c)} of {len(compared.domains)}" for c in compared)
    return (
        row("average perplexity", map(format_perplexity, means), best=means == means.min()),
        row("  standard deviation over seeds", map(format_perplexity, deviations)),
        row(f"  less {baseline.label}'s, paired", (f"{g.mean:+.2f}" for g in gaps), is_baseline),
        row("  standard error of that", (f"{g.standard_error:.2f}" for g in gaps), is_baseline),
        row(f"domains better than {baseline.label}", better, is_baseline),
    )


def _cost_rows(compared: HeadToHead) -> tuple[Row, ...]:
    amounts = [c.amounts for c in compared]
    rows = [
        row("FLOPs to obtain the mixture", (_known(a["flops"], _counted) for a in amounts)),
        row(
            "device-seconds for that",
            (_known(a["device_seconds"], "{:,.1f}".format) for a in amounts),
        ),
    ]
    if compared.reference is not None:
        label, multiples = compared.reference.label, [compared.multiples(c) for c in compared]
        rows += [
            row(f"FLOPs by {label}'s", (format_multiple(m["flops"]) for m in multiples)),
            row(
                f"device-seconds by {label}'s",
                (format_multiple(m["device_seconds"]) for m in multiples),
            ),
        ]
    return tuple(rows)


def _known(amount: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if amount is None else form(amount)


def _counted(flops: float) -> str:
    return format_flops(flops) if flops else "0"
