"""Writing Megatron's .bin/.idx files, in memory that does not grow with them.

The format is written here rather than by megatron.core, which takes seconds to import and holds
every document's length in memory; the tests compare the files with those of its builder.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.block_checksums import BlockHasher

TokenType = Literal["uint16", "int32"]
# What an .idx file begins with: kind, version, code of the token type, sequences, and documents
# plus one.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TYPE_CODES: dict[TokenType, int] = {"uint16": 8, "int32": 4}
# Megatron-LM keeps to 32-bit integers a little before uint16 is full.
_UINT16_VOCABULARY = 65_500

_BUFFER_BYTES = 1 << 20
_INDEX_BLOCK = 1 << 17  # entries of the index handled at a time


def token_type(vocab_size: int) -> TokenType:
    """Megatron's choice of integer for a vocabulary: uint16 where it fits."""
    return "uint16" if vocab_size < _UINT16_VOCABULARY else "int32"


class IndexedWriter:
    """Writes one pair of .bin/.idx files, each document one sequence, and their checksums.

    No file is held open, so that any number of domains can be written side by side.

    Attributes:
        documents: documents added so far.
        tokens: their tokens, end-of-document tokens included.
        waiting_bytes: what of them is still in memory.
        block_checksums: hex SHA-256 of the .xxh3 file, once the writer has finished.

    Args:
        prefix: path of the files, without their suffix.
        dtype: integer type of a token on disk.
    """

    def __init__(self, prefix: Path, dtype: TokenType) -> None:
        self._bin_path = prefix.with_name(prefix.name + ".bin")
        self._idx_path = prefix.with_name(prefix.name + ".idx")
        self._checksums_path = prefix.with_name(prefix.name + ".xxh3")
        self._type = dtype
        self._dtype = np.dtype(dtype)
        self._tokens = bytearray()
        self._lengths = bytearray()
        self._digest = hashlib.sha256()
        self._blocks = BlockHasher()
        self._checksums_digest = hashlib.sha256()
        self._checksums_mode: Literal["wb", "ab"] = "wb"
        self._index_begun = False
        self.documents = 0
        self.tokens = 0
        with writing(self._bin_path), self._bin_path.open("xb"):
            pass  # never one that is there: it may be another name of somebody else's

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the next flush writes."""
        return len(self._tokens) + len(self._lengths)

    def add(self, tokens: NDArray[np.integer]) -> None:
        """Append one document [num_tokens], its end-of-document token included.

        Raises:
            UserError: if the disk does not take it.
        """
        self.add_tokens(tokens.astype(self._dtype).tobytes())
        self.add_lengths(np.array([tokens.size], dtype=np.int32))

    def add_tokens(self, tokens: bytes | memoryview) -> None:
        """Append tokens as they lie on disk; ``add_lengths`` tells the documents they make up."""
        self._tokens += tokens
        if len(self._tokens) >= _BUFFER_BYTES:
            self.flush()

    def add_lengths(self, lengths: NDArray[np.int32]) -> None:
        """Say that the next documents have ``lengths`` [num_documents] tokens."""
        self._lengths += lengths.tobytes()
        self.documents += lengths.size
        self.tokens += int(lengths.sum(dtype=np.int64))

    def flush(self) -> None:
        """Write what is in memory.

        Raises:
            UserError: if the disk does not take it.
        """
        if self._tokens:
            _append(self._bin_path, self._tokens)
            self._digest.update(self._tokens)
            self._blocks.update(self._tokens)
            self._tokens = bytearray()
            if self._blocks.waiting_bytes >= _BUFFER_BYTES:
                self._write_checksums()
        if self._lengths:
            self._begin_index()
            _append(self._idx_path, self._lengths)
            self._lengths = bytearray()

    def finish(self) -> str:
        """Write the rest and the index; return the SHA-256 of .bin and .idx, concatenated.

        Raises:
            UserError: if the disk does not take it.
        """
        self.flush()
        self._begin_index()
        with writing(self._idx_path), self._idx_path.open("r+b") as stream:
            self._write_pointers(stream)
            self._write_boundaries(stream)
            stream.seek(0)
            code = TYPE_CODES[self._type]
            stream.write(HEADER.pack(MAGIC, VERSION, code, self.documents, self.documents + 1))
        self._blocks.end_block()
        with self._idx_path.open("rb") as stream:
            while block := stream.read(_BUFFER_BYTES):
                self._digest.update(block)
                self._blocks.update(block)
        self._blocks.end_block()
        self._write_checksums()
        return self._digest.hexdigest()

    @property
    def block_checksums(self) -> str:
        """Hex SHA-256 of the .xxh3 file."""
        return self._checksums_digest.hexdigest()

    def _write_checksums(self) -> None:
        checksums = self._blocks.take()
        self._checksums_digest.update(checksums)
        with (
            writing(self._checksums_path),
            self._checksums_path.open(self._checksums_mode) as stream,
        ):
            stream.write(checksums)
        self._checksums_mode = "ab"

    def _begin_index(self) -> None:
        # Until the end the header is blank: nothing takes such a file for a whole one.
        if not self._index_begun:
            _append(self._idx_path, bytes(HEADER.size))
            self._index_begun = True

    def _write_pointers(self, stream: BinaryIO) -> None:
        """Append where in .bin each document begins, in bytes, from the lengths that are there."""
        end = 0
        for first in range(0, self.documents, _INDEX_BLOCK):
            stream.seek(HEADER.size + 4 * first)
            count = min(_INDEX_BLOCK, self.documents - first)
            lengths = np.frombuffer(stream.read(4 * count), dtype=np.int32)
            sizes = lengths.astype(np.int64) * self._dtype.itemsize
            ends = end + np.cumsum(sizes)
            stream.seek(HEADER.size + 4 * self.documents + 8 * first)
            stream.write((ends - sizes).tobytes())
            end = int(ends[-1])

    def _write_boundaries(self, stream: BinaryIO) -> None:
        """Append the sequence at which each document begins, and the last one's end."""
        stream.seek(HEADER.size + 12 * self.documents)
        for first in range(0, self.documents + 1, _INDEX_BLOCK):
            last = min(first + _INDEX_BLOCK, self.documents + 1)
            stream.write(np.arange(first, last, dtype=np.int64).tobytes())


def _append(path: Path, block: bytes | bytearray) -> None:
    with writing(path), path.open("ab") as stream:
        stream.write(block)
