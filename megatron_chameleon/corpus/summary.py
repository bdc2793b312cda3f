"""What preprocessing says when it is done: a table of the corpus, and what to run next."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_chameleon.artifacts import SPLITS, Corpus, Domain
from megatron_chameleon.corpus.domain_writer import DomainWriter
from megatron_chameleon.corpus.malformed import MalformedLines

_HEADER = (
    "domain",
    "documents",
    *(f"{split} tokens" for split in SPLITS),
    "bytes/token",
    "duplicates",
    "empty",
    "malformed",
)


def closing_words(
    corpus: Corpus, writers: Mapping[str, DomainWriter], malformed: MalformedLines
) -> str:
    """A row per domain, the total, where the corpus is, and the next command."""
    rows = [
        _row(
            name,
            [domain],
            (writers[name].duplicates, writers[name].empty, malformed.by_domain[name]),
        )
        for name, domain in corpus.domains.items()
    ]
    total = _row(
        "total",
        list(corpus.domains.values()),
        (
            sum(writer.duplicates for writer in writers.values()),
            sum(writer.empty for writer in writers.values()),
            malformed.count,  # with the lines that were to name their domain themselves
        ),
    )
    table = format_table([_HEADER, *rows, total])
    seconds = corpus.cost.wall_seconds
    return (
        f"{table}\n\nwrote {corpus.root} in {seconds:.0f} s\n"
        f"next: torchrun --nproc-per-node 1 tools/pretrain_gpt.py --corpus {corpus.root} "
        "--run-dir RUN --model-size SIZE --mixture uniform"
    )


def _row(name: str, domains: list[Domain], counts: tuple[int, int, int]) -> tuple[str, ...]:
    parts = {split: [domain.split(split) for domain in domains] for split in SPLITS}
    tokens = {split: sum(part.tokens for part in parts[split]) for split in SPLITS}
    every_part = [part for split in SPLITS for part in parts[split]]
    text_bytes = sum(part.text_bytes for part in every_part)
    return (
        name,
        f"{sum(part.documents for part in every_part):,}",
        *(f"{tokens[split]:,}" for split in SPLITS),
        f"{text_bytes / sum(tokens.values()):.2f}",
        *(f"{count:,}" for count in counts),
    )


def format_table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they need, the first to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if position == 0 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
