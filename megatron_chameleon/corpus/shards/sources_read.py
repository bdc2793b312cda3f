"""What a corpus was made from: every source, and the hash of every piece that was read of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.record import write_record
from megatron_chameleon.corpus.shards.plan import Plan
from megatron_chameleon.corpus.shards.shard import Shard


@dataclasses.dataclass(frozen=True)
class _PieceRead:
    start: int
    stop: int | None
    sha256: str


@dataclasses.dataclass(frozen=True)
class _SourceRead:
    name: str
    bytes: int
    pieces: list[_PieceRead]


@dataclasses.dataclass(frozen=True)
class _SourcesRead:
    sources: list[_SourceRead]


def write_sources(path: Path, plan: Plan, shards: Sequence[Shard]) -> str:
    """Write ``path`` and return one hash for the contents of all sources, in their order.

    Raises:
        UserError: if the disk does not take it.
    """
    pieces: list[list[_PieceRead]] = [[] for _ in plan.sources]
    for planned, shard in zip(plan.shards, shards, strict=True):
        for piece, sha256 in zip(planned, shard.hashes, strict=True):
            pieces[piece.source].append(_PieceRead(piece.start, piece.stop, sha256))
    sources = [
        _SourceRead(source.name, source.bytes, read)
        for source, read in zip(plan.sources, pieces, strict=True)
    ]
    write_record(path, _SourcesRead(sources), kind="sources of a corpus", version=1)
    return sha256_of_json([piece.sha256 for read in pieces for piece in read])
