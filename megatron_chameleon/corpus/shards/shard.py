"""What one shard leaves on disk: tokens, a record per document, and digests to join by.

A shard is a folder that comes into being by one rename, so that where it is there it is whole:

    shard.json      what was counted on the way; the files below are read by what it says
    tokens.bin      the tokens of all documents, one after another, as a corpus has them; of the
                    only shard of a plan tokens-N.bin/.idx instead, see ``parts``
    documents.bin   DOCUMENT for each document, in the order of its tokens
    digests.bin     DIGEST for each different text of a domain and split, in sorted runs
    copies.bin      COPY for each document whose text came before in the same run
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_chameleon.artifacts.files import flush_to_disk, writing
from megatron_chameleon.artifacts.record import FolderRecord, InnerPath
from megatron_chameleon.corpus.indexed import TokenType
from megatron_chameleon.corpus.reading.malformed import MalformedRecord
from megatron_chameleon.corpus.shards.parts import PartsWriter, ShardPart
from megatron_chameleon.errors import UserError

DOCUMENT = np.dtype(
    [("tokens", "<i4"), ("domain", "<u2"), ("split", "u1"), ("given", "u1"), ("text_bytes", "<i8")]
)
# The two halves of a text's digest, its document, and where that goes: whether its split was given
# by the source, or told by the digest.
DIGEST = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("document", "<u4"),
        ("domain", "<u2"),
        ("split", "u1"),
        ("given", "u1"),
    ]
)
COPY = np.dtype([("document", "<u4"), ("first", "<u4"), ("domain", "<u2")])

TOKENS_NAME, DOCUMENTS_NAME = "tokens.bin", "documents.bin"
DIGESTS_NAME, COPIES_NAME = "digests.bin", "copies.bin"

# Megatron's blended index numbers the domains in int16.
MAX_DOMAINS = 32_767
# Digests that are held in memory and sorted together.
_RUN_DOCUMENTS = 1 << 18
_BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shard(FolderRecord):
    """A finished shard, as its shard.json tells it.

    Attributes:
        plan: hash of the plan it belongs to.
        domains: names, in the order of their first mention; records hold positions in this list.
        empty: documents without text, or without a token of it, by domain.
        documents: documents written.
        tokens: their tokens, end-of-document tokens included.
        runs: how many digests there are in each sorted run.
        copies: documents whose text came before in the same run.
        hashes: SHA-256 of what was read, for each piece.
        checksums: file -> hex XXH3 (128 bits) of its content.
        malformed: the lines that were left out.
        seconds: on the clock.
        parts: the files of the tokens, where they lie apart by domain and split; else None.
        renamed: names of domains that --rename-domain has changed or left out.
    """

    KIND = "preprocessed shard"
    FILE_NAME = "shard.json"
    FORMAT_VERSION = 2  # 1 had no checksums
    MADE_BY = "tools/preprocess_data.py writes it"

    plan: str
    dtype: TokenType
    domains: list[str]
    empty: list[int]
    documents: int
    tokens: int
    runs: list[int]
    copies: int
    hashes: list[str]
    checksums: dict[InnerPath, str]
    malformed: MalformedRecord
    seconds: float
    parts: list[ShardPart] | None = None
    renamed: list[str] = dataclasses.field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        """Bytes of all tokens."""
        return self.tokens * np.dtype(self.dtype).itemsize

    def check_files(self) -> None:
        """Compare the files with their checksums.

        Raises:
            UserError: naming the first one that differs.
        """
        for name, checksum in self.checksums.items():
            path = self.root / name
            if not path.is_file() or _checksum(path) != checksum:
                raise UserError(
                    f"{path} does not match its checksum: remove {self.root} and run the same "
                    "command again"
                )

    def document_blocks(self, size: int) -> Iterator[NDArray[np.void]]:
        """The DOCUMENT records, at most ``size`` at a time."""
        return _blocks(self.root / DOCUMENTS_NAME, DOCUMENT, size)

    def copy_blocks(self, size: int) -> Iterator[NDArray[np.void]]:
        """The COPY records, at most ``size`` at a time."""
        return _blocks(self.root / COPIES_NAME, COPY, size)


class ShardWriter:
    """Writes the files of one shard, in memory that does not grow with it.

    Args:
        folder: where to; it is there and empty.
        dtype: integer type of a token on disk.
        apart: whether the tokens go to files by domain and split.
    """

    def __init__(self, folder: Path, dtype: TokenType, *, apart: bool = False) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._waiting: list[NDArray[np.void]] = []
        self._waiting_digests = 0
        self.documents = 0
        self.tokens = 0
        self.runs: list[int] = []
        self.copies = 0
        self.parts: list[ShardPart] | None = None
        self.checksums: dict[str, str] = {}
        self._parts = PartsWriter(folder, dtype) if apart else None
        for name in self._names():
            self._append(name, b"")

    def add(
        self,
        tokens: NDArray[np.integer],
        documents: NDArray[np.void],
        digests: NDArray[np.uint64],
    ) -> None:
        """Append documents.

        Args:
            tokens: [num_tokens] of all of them, end-of-document tokens included.
            documents: [num_documents] DOCUMENT records.
            digests: [num_documents, 2] the halves of their texts' digests.

        Raises:
            UserError: if the disk does not take them.
        """
        on_disk = tokens.astype(self._dtype, copy=False)
        if self._parts is None:
            self._append(TOKENS_NAME, on_disk.data)
        else:
            self._parts.add(on_disk, documents)
        self._append(DOCUMENTS_NAME, documents.tobytes())
        records = np.zeros(documents.size, DIGEST)
        records["high"], records["low"] = digests[:, 0], digests[:, 1]
        records["document"] = np.arange(self.documents, self.documents + documents.size)
        for name in ("domain", "split", "given"):
            records[name] = documents[name]
        self.documents += documents.size
        self.tokens += tokens.size
        self._waiting.append(records)
        self._waiting_digests += documents.size
        if self._waiting_digests >= _RUN_DOCUMENTS:
            self._write_run()

    def finish(self) -> None:
        """Write what is left, wait until the disk has it, and take the files' checksums."""
        self._write_run()
        files = [self._folder / name for name in self._names()]
        if self._parts is not None:
            self.parts = self._parts.finish()
            files += [path for part in self.parts for path in part.paths(self._folder)]
        self.checksums = {path.name: _checksum(path) for path in files}
        for name in self._names():
            with writing(self._folder / name):
                flush_to_disk(self._folder / name)

    def _names(self) -> list[str]:
        tokens = [TOKENS_NAME] if self._parts is None else []
        return [*tokens, DOCUMENTS_NAME, DIGESTS_NAME, COPIES_NAME]

    def _write_run(self) -> None:
        if not self._waiting_digests:
            return
        unique, copies = sorted_digests(np.concatenate(self._waiting))
        self._append(DIGESTS_NAME, unique.tobytes())
        self._append(COPIES_NAME, copies.tobytes())
        self.runs.append(unique.size)
        self.copies += copies.size
        self._waiting, self._waiting_digests = [], 0

    def _append(self, name: str, block: bytes | memoryview) -> None:
        path = self._folder / name
        with writing(path), path.open("ab") as stream:
            stream.write(block)


def sorted_digests(
    records: NDArray[np.void],
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Sort DIGEST records; of those that are alike but for their document the first stays.

    However often a text comes, it has one record: a sentence that fills a tenth of a corpus would
    otherwise fill the memory where digests are compared.

    Args:
        records: [num_documents] in the order of the documents.

    Returns:
        The records that stay, by digest; and COPY records of the others.
    """
    keys = ("given", "split", "domain", "low", "high")
    ordered = records[np.lexsort([records[name] for name in ("document", *keys)])]
    same = np.zeros(ordered.size, dtype=bool)
    same[1:] = True
    for name in keys:
        same[1:] &= ordered[name][1:] == ordered[name][:-1]
    firsts = np.maximum.accumulate(np.where(same, 0, np.arange(ordered.size)))
    copies = np.zeros(int(same.sum()), COPY)
    copies["document"], copies["domain"] = ordered["document"][same], ordered["domain"][same]
    copies["first"] = ordered["document"][firsts[same]]
    return ordered[~same], copies


def domain_number(numbers: dict[str, int], name: str) -> int:
    """The number of domain ``name``: the next one, if it is not among ``numbers`` yet.

    Raises:
        UserError: if it is one domain too many.
    """
    number = numbers.setdefault(name, len(numbers))
    if number >= MAX_DOMAINS:
        raise UserError(
            f"there are more than {MAX_DOMAINS} domains, '{name}' among them; is --domain-key the "
            "right one?"
        )
    return number


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _blocks(path: Path, dtype: np.dtype[np.void], size: int) -> Iterator[NDArray[np.void]]:
    with path.open("rb") as stream:
        while block := stream.read(size * dtype.itemsize):
            yield np.frombuffer(block, dtype)
