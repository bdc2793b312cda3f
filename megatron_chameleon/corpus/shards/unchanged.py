"""Shards that are finished have to be of the sources as they are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_chameleon.corpus.reading.readers import DocumentReader
from megatron_chameleon.corpus.shards.plan import Plan
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.preprocess import PreprocessOptions


def check_what_was_read(
    options: PreprocessOptions,
    now: Plan,
    begun: Plan,
    hashes: Mapping[int, list[str]],
    on_bytes: Callable[[int], object],
) -> None:
    """Read again what finished shards have read of sources that were written to since.

    Args:
        options: of the run.
        now: the plan with the sources as they are.
        begun: the same plan with the sources as they were when it was made.
        hashes: number of each finished shard -> the hash of each of its pieces.
        on_bytes: is told how many bytes of a source were just read.

    Raises:
        UserError: naming the first source of another content.
    """
    touched = {
        number
        for number, (source, before) in enumerate(zip(now.sources, begun.sources, strict=True))
        if source.modified_ns != before.modified_ns
    }
    reader = DocumentReader(options.source, now.sources, options.domains, on_bytes)
    for shard, shard_hashes in sorted(hashes.items()):
        for piece, before in zip(now.shards[shard], shard_hashes, strict=True):
            if piece.source not in touched:
                continue
            for _ in reader.read(piece):
                pass
            source = now.sources[piece.source]
            if reader.hashes[piece] != before:
                raise UserError(
                    f"{source.name} has changed since it was read for {begun.root}: its content is "
                    f"another one; restore it, or remove {begun.root} to begin anew"
                )
