"""Held-out losses with their standard errors, and bits per byte: what perplexities do not show."""

from __future__ import annotations

from megatron_chameleon.artifacts import Difference, DomainLoss, loss_difference
from megatron_chameleon.report.comparison import Comparison, Evaluated
from megatron_chameleon.report.tables import format_error
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

PLACES = 4
# A difference beyond so many standard errors is more than the choice of held-out documents.
SURE = 2.0


def loss_table(comparison: Comparison) -> Table:
    """Per domain: predicted tokens, the loss of every run, and the others' less the baseline's."""
    first = comparison.runs[0].result.domains
    others = comparison.others if comparison.baseline else ()
    rows = tuple(
        (
            Cell(name),
            Cell(f"{first[name].tokens:,}"),
            *(Cell(_loss(run.result.domains[name])) for run in comparison.runs),
            *(Cell(_told(_difference(comparison, run, name))) for run in others),
        )
        for name in comparison.domains
    )
    rows += _without_figures(comparison, 1 + len(comparison.runs) + len(others))
    notes = [
        "Nats per token ± the standard error over documents: that of another draw of held-out "
        "text, not of another training run."
    ]
    baseline = comparison.baseline.label if comparison.baseline else ""
    if others:
        notes.append(
            f"Differences to {baseline} are paired: both models predict the same tokens. The "
            f"last rows count those beyond {SURE:g} standard errors."
        )
    return Table(
        title="Held-out loss",
        header=(
            "domain",
            "tokens",
            *(f"loss {run.label}" for run in comparison.runs),
            *(f"{run.label} less {baseline}" for run in others),
        ),
        rows=rows,
        summary=_surely_better(comparison, others),
        notes=tuple(notes),
    )


def bits_per_byte_table(comparison: Comparison) -> Table | None:
    """Per domain: bytes of text and bits per byte of every run; None where no bytes are known."""
    first = comparison.runs[0].result.domains
    if not any(domain.text_bytes for domain in first.values()):
        return None
    rows = []
    for name in comparison.domains:
        figures = [run.result.domains[name] for run in comparison.runs]
        known = [figure.bits_per_byte for figure in figures if figure.bits_per_byte is not None]
        lowest = min(known) if len(known) > 1 else None
        cells = [Cell(_bits(f), best=f.bits_per_byte == lowest is not None) for f in figures]
        size = first[name].text_bytes
        rows.append((Cell(name), Cell(MISSING if size is None else f"{size:,}"), *cells))
    rows += _without_figures(comparison, 1 + len(comparison.runs))
    return Table(
        title="Bits per byte",
        header=("domain", "bytes of text", *(run.label for run in comparison.runs)),
        rows=tuple(rows),
        notes=(
            "Bits of loss over the UTF-8 bytes that the predicted tokens stand for, which can be "
            "compared across tokenizers; ± the standard error over documents.",
        ),
    )


def _without_figures(comparison: Comparison, columns: int) -> tuple[Row, ...]:
    """Rows of the domains whose split has nothing to predict."""
    return tuple((Cell(name), *[Cell()] * columns) for name in comparison.left_out)


def _loss(domain: DomainLoss) -> str:
    return format_error(domain.loss, domain.loss_error, PLACES, sign="")


def _bits(domain: DomainLoss) -> str:
    if domain.bits_per_byte is None:
        return MISSING
    return format_error(domain.bits_per_byte, domain.bits_per_byte_error, PLACES, sign="")


def _difference(comparison: Comparison, run: Evaluated, name: str) -> Difference:
    assert comparison.baseline is not None
    return loss_difference(run.result.domains[name], comparison.baseline.result.domains[name])


def _told(difference: Difference) -> str:
    return format_error(difference.value, difference.error, PLACES)


def _surely_better(comparison: Comparison, others: tuple[Evaluated, ...]) -> tuple[Row, ...]:
    """In how many domains each run is lower, and higher, by more than chance."""
    if not others:
        return ()
    blank = [Cell("")] * (1 + len(comparison.runs))
    return tuple(
        (Cell(label), *blank, *(Cell(_count(comparison, run, sign)) for run in others))
        for label, sign in (("surely lower", -1), ("surely higher", 1))
    )


def _count(comparison: Comparison, run: Evaluated, sign: int) -> str:
    found = [_difference(comparison, run, name) for name in comparison.domains]
    known = [(d.value, d.error) for d in found if d.error is not None]
    beyond = sum(sign * value > SURE * error for value, error in known)
    return f"{beyond} of {len(known)}" if known else MISSING
