"""An evaluation as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_chameleon.artifacts import DomainLoss, EvaluationResult

MISSING = "-"
ERROR = "±"
HEADER = ("tokens", "loss", ERROR, "perplexity", ERROR, "bits/byte", ERROR, "unigram")
AVERAGE = "average"


def result_table(result: EvaluationResult, unknown_bytes: str = "") -> str:
    """A row a domain, the average, and what the figures are.

    Args:
        result: of one checkpoint.
        unknown_bytes: why bits per byte are not known, where that has a reason to tell.
    """
    rows: list[tuple[str, ...]] = [("domain", *HEADER)]
    rows += [(name, *_figures(domain)) for name, domain in result.domains.items()]
    mean = (_number(result.mean_perplexity, 2), _number(result.mean_perplexity_error, 2))
    rows.append((AVERAGE, "", "", "", *mean, "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    lines.append(f"on {result.protocol.told()}; {ERROR} is the standard error over documents")
    if any(domain.text_bytes is None for domain in result.domains.values()):
        reason = unknown_bytes or "corpus.json does not say how many bytes the text has"
        lines.append(f"no bits per byte: {reason}")
    if result.left_out:
        lines.append(f"nothing to predict, and not in the average: {', '.join(result.left_out)}")
    return "\n".join(lines)


def _figures(domain: DomainLoss) -> tuple[str, ...]:
    return (
        f"{domain.tokens:,}",
        _number(domain.loss, 4),
        _number(domain.loss_error, 4),
        _number(domain.perplexity, 2),
        _number(domain.perplexity_error, 2),
        _number(domain.bits_per_byte, 4),
        _number(domain.bits_per_byte_error, 4),
        _number(domain.unigram_perplexity, 2),
    )


def _number(figure: float | None, places: int) -> str:
    return MISSING if figure is None else f"{figure:.{places}f}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """The first column to the left, the others to the right."""
    first, *others = zip(row, widths, strict=True)
    texts = [f"{first[0]:{first[1]}}", *(f"{text:>{width}}" for text, width in others)]
    return "  ".join(texts).rstrip()
