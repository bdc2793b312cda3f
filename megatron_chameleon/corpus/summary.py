"""What preprocessing says when it is done: a table of the corpus, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.corpus.reading.malformed import MalformedLines
from megatron_chameleon.corpus.shards.share import Share, shares_of

_SHARES_SHOWN = 10


def closing_words(corpus: Corpus, malformed: MalformedLines, found: int, shards: int) -> str:
    """A row per domain, the total, where the corpus is, and the next command.

    Args:
        corpus: what was written.
        malformed: lines left out, with those that were to name their domain themselves.
        found: shards that were there before this run.
        shards: all of them.
    """
    held_out = any(each.held_out for each in corpus.not_written.values())
    header = (
        "domain",
        "documents",
        *(f"{split} tokens" for split in SPLITS),
        "bytes/token",
        "duplicates",
        *(["held out"] if held_out else []),
        "empty",
        "malformed",
    )
    rows = [
        _row(corpus, name, [name], corpus.not_written[name].malformed, held_out)
        for name in corpus.names
    ]
    rows.append(_row(corpus, "total", corpus.names, malformed.count, held_out))
    table = format_table([header, *rows])
    unwanted = malformed.describe_unwanted()
    kept = f"; {found} of {shards} shards were there from before" if found else ""
    return (
        f"{table}\n{unwanted}\nwrote {corpus.root} in {corpus.cost.wall_seconds:.0f} s{kept}\n"
        f"next: torchrun --nproc-per-node 1 tools/pretrain_gpt.py --corpus {corpus.root} "
        "--run-dir RUN --model-size SIZE --mixture uniform"
    )


def words_after_share(share: Share, shards: int, missing: Collection[int]) -> str:
    """What a run with --shard says: what is missing, and what to run next."""
    if not missing:
        return (
            f"--shard {share} is done, and so are all {shards} shards\n"
            "next: the same command without --shard joins them"
        )
    others = [f"--shard {other}" for other in shares_of(missing, share.count)]
    more = f" and {len(others) - _SHARES_SHOWN} more" if len(others) > _SHARES_SHOWN else ""
    return (
        f"--shard {share} is done; {len(missing)} of all {shards} shards are missing\n"
        f"next: the same command with {', '.join(others[:_SHARES_SHOWN])}{more}, and without "
        "--shard in the end"
    )


def words_on_left_desks(partial: Path, desks: Sequence[str]) -> str:
    """What is said of what processes of other machines have half-written, once all is joined."""
    more = f" and {len(desks) - 1} more" if len(desks) > 1 else ""
    return (
        f"{partial} still holds what processes of other machines have half-written ({desks[0]}"
        f"{more}): when none of them is at work any more, remove it by rm -r "
        f"{shlex.quote(str(partial))}"
    )


def _row(
    corpus: Corpus, head: str, names: Sequence[str], malformed: int, held_out: bool
) -> tuple[str, ...]:
    domains = [corpus.domains[name] for name in names]
    parts = {split: [domain.split(split) for domain in domains] for split in SPLITS}
    tokens = {split: sum(part.tokens for part in parts[split]) for split in SPLITS}
    every_part = [part for split in SPLITS for part in parts[split]]
    text_bytes = sum(part.text_bytes for part in every_part)
    not_written = [corpus.not_written[name] for name in names]
    counts = (
        sum(each.duplicates for each in not_written),
        *([sum(each.held_out for each in not_written)] if held_out else []),
        sum(each.empty for each in not_written),
        malformed,
    )
    return (
        head,
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
