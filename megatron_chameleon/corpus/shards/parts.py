"""The tokens of the only shard of a plan, already in the files that the corpus will have of them.

The documents of each domain and split lie in a pair of .bin/.idx files of their own. Where none of
them is left out, joining gives those files another name, and copies nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.artifacts.files import flush_all_to_disk, writing
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenType

# What all domains together may hold before it is written; a few domains never come near.
_WAITING_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class ShardPart:
    """What is in one pair of files.

    Attributes:
        domain: its number in the shard.
        split: position in SPLITS.
        documents: in the files.
        tokens: of them, end-of-document tokens included.
        text_bytes: of their texts in UTF-8.
        sha256: hex, of .bin and .idx one after the other.
        block_checksums: hex SHA-256 of the .xxh3 file.
    """

    domain: int
    split: int
    documents: int
    tokens: int
    text_bytes: int
    sha256: str
    block_checksums: str

    @property
    def source(self) -> int:
        """The number of domain and split together."""
        return self.domain * len(SPLITS) + self.split

    def paths(self, folder: Path) -> tuple[Path, Path, Path]:
        """Its .bin, .idx and .xxh3 in the shard's ``folder``."""
        tokens = bin_path(folder, self.source)
        return tokens, tokens.with_suffix(".idx"), tokens.with_suffix(".xxh3")


def bin_path(folder: Path, source: int) -> Path:
    """The tokens of domain and split ``source`` in the shard's ``folder``."""
    return folder / f"tokens-{source}.bin"


def sources_of(documents: NDArray[np.void]) -> NDArray[np.int64]:
    """[num_documents] domain and split of DOCUMENT records as one number."""
    return documents["domain"].astype(np.int64) * len(SPLITS) + documents["split"]


class PartsWriter:
    """Writes the files of all domains and splits, in memory that does not grow with them.

    Args:
        folder: of the shard.
        dtype: integer type of a token on disk.
    """

    def __init__(self, folder: Path, dtype: TokenType) -> None:
        self._folder = folder
        self._type = dtype
        self._writers: dict[int, IndexedWriter] = {}
        self._text_bytes: dict[int, int] = {}
        self._waiting = 0

    def add(self, tokens: NDArray[np.integer], documents: NDArray[np.void]) -> None:
        """Append ``documents`` [num_documents] and their ``tokens`` [num_tokens], as on disk.

        Raises:
            UserError: if the disk does not take them.
        """
        sources = sources_of(documents)
        begins = np.append(0, np.flatnonzero(np.diff(sources)) + 1)
        counts = np.add.reduceat(documents["tokens"], begins, dtype=np.int64)
        ends = np.append(begins[1:], sources.size)
        first = 0
        for begin, end, count in zip(begins.tolist(), ends.tolist(), counts.tolist(), strict=True):
            number, last = int(sources[begin]), first + count
            writer = self._writer(number)
            writer.add_tokens(tokens[first:last].view(np.uint8).data)
            writer.add_lengths(documents["tokens"][begin:end])
            self._text_bytes[number] += int(documents["text_bytes"][begin:end].sum())
            first = last
        self._make_room(tokens.nbytes)

    def finish(self) -> list[ShardPart]:
        """Write what is left, wait until the disk has it, and say what is where."""
        parts = []
        for source, writer in sorted(self._writers.items()):
            domain, split = divmod(source, len(SPLITS))
            counts = (writer.documents, writer.tokens, self._text_bytes[source])
            parts.append(ShardPart(domain, split, *counts, writer.finish(), writer.block_checksums))
        with writing(self._folder):
            flush_all_to_disk([path for part in parts for path in part.paths(self._folder)])
        return parts

    def _writer(self, source: int) -> IndexedWriter:
        if source not in self._writers:
            prefix = bin_path(self._folder, source).with_suffix("")
            self._writers[source] = IndexedWriter(prefix, self._type)
            self._text_bytes[source] = 0
        return self._writers[source]

    def _make_room(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _WAITING_BYTES:
            for writer in self._writers.values():
                writer.flush()
            self._waiting = 0
