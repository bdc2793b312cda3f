"""Pieces of sources, and how they are put together to shards of about the same size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_chameleon.corpus.reading.parquet import row_group_bytes

if TYPE_CHECKING:
    from megatron_chameleon.corpus.reading.sources import Source


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a source, or all of it.

    Attributes:
        source: position in the list of sources.
        start: where it begins: a byte of plain JSON lines, a row group of parquet, otherwise 0.
        stop: where the next one begins, None for the end of the source. A line belongs to the
            piece in which it begins.
        bytes: on disk; 0 where nobody knows.
    """

    source: int
    start: int = 0
    stop: int | None = None
    bytes: int = 0


def cut(sources: Sequence[Source], target_bytes: int) -> list[list[Piece]]:
    """Cut ``sources`` into shards of at most ``target_bytes`` on disk, where that is possible.

    Large sources are cut where their format allows it, small ones share a shard. The pieces of all
    shards, one after another, are the sources in their order; the same sources are always cut in
    the same way.

    Raises:
        UserError: if a parquet file that has to be cut cannot be read.
    """
    shards: list[list[Piece]] = []
    room = 0
    for number, source in enumerate(sources):
        size_unknown = source.kind == "dataset" and source.bytes == 0
        for piece in _pieces(number, source, target_bytes):
            if not shards or piece.bytes > room or size_unknown:
                shards.append([])
                room = target_bytes
            shards[-1].append(piece)
            room = -1 if size_unknown else room - piece.bytes
    return shards


def _pieces(number: int, source: Source, target_bytes: int) -> Iterator[Piece]:
    if not source.cuttable or source.bytes <= target_bytes:
        yield Piece(number, bytes=source.bytes)
        return
    if source.kind == "parquet":
        edges = _row_group_edges(source.path, target_bytes)
    else:
        count = -(-source.bytes // target_bytes)
        edges = [(at, at) for at in (source.bytes * i // count for i in range(count))]
    ends = [*edges[1:], (None, source.bytes)]
    for (start, start_byte), (stop, stop_byte) in zip(edges, ends, strict=True):
        yield Piece(number, start, stop, stop_byte - start_byte)


def _row_group_edges(path: str, target_bytes: int) -> list[tuple[int, int]]:
    """First row group of each piece, and the byte at which it lies."""
    edges, size, total = [(0, 0)], 0, 0
    for group, group_bytes in enumerate(row_group_bytes(path)):
        if size and size + group_bytes > target_bytes:
            edges.append((group, total))
            size = 0
        size += group_bytes
        total += group_bytes
    return edges
