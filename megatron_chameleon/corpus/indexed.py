"""Megatron's .bin/.idx files: writing one split of a domain, and opening it again.

megatron.core is imported inside the functions: it takes seconds, which ``--help`` and a misspelt
path should not wait for.
"""

from __future__ import annotations

import array
import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Split
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

TokenType = Literal["uint16", "int32"]
_BUFFER_BYTES = 1 << 20
# What an .idx file begins with: kind, version, code of the token type, sequences, and documents
# plus one.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1


def token_type(vocab_size: int) -> TokenType:
    """Megatron's choice of integer for a vocabulary: uint16 where it fits."""
    from megatron.core.datasets.indexed_dataset import DType

    return "uint16" if DType.optimal_dtype(vocab_size) is np.uint16 else "int32"


class IndexedWriter:
    """Writes one pair of .bin/.idx files, each document one sequence.

    The bytes are those of megatron.core's IndexedDatasetBuilder, which takes a tensor and holds an
    open file per data set; here token arrays are gathered and appended, so that any number of
    domains can be written side by side.

    Args:
        prefix: path of the files, without their suffix.
        dtype: integer type of a token on disk.
    """

    def __init__(self, prefix: Path, dtype: TokenType) -> None:
        self._bin_path = prefix.with_name(prefix.name + ".bin")
        self._idx_path = prefix.with_name(prefix.name + ".idx")
        self._dtype = np.dtype(dtype)
        self._lengths = array.array("i")
        self._waiting: list[NDArray[np.integer]] = []
        self._waiting_tokens = 0
        self._digest = hashlib.sha256()
        self.tokens = 0
        _append(self._bin_path, b"")

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, tokens: NDArray[np.integer]) -> None:
        """Append one document [num_tokens], its end-of-document token included.

        Raises:
            UserError: if the disk does not take it.
        """
        self._lengths.append(tokens.size)
        self._waiting.append(tokens)
        self._waiting_tokens += tokens.size
        self.tokens += tokens.size
        if self._waiting_tokens * self._dtype.itemsize >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> str:
        """Write what is left and the index; return the SHA-256 of .bin and .idx, one after other.

        Raises:
            UserError: if the disk does not take it.
        """
        from megatron.core.datasets.indexed_dataset import _IndexWriter

        self._flush()
        lengths = np.array(self._lengths, dtype=np.int32)
        try:
            with _IndexWriter(str(self._idx_path), self._dtype.type) as writer:
                writer.write(lengths, None, np.arange(lengths.size + 1))
        except OSError as error:
            raise _not_written(self._idx_path, error) from error
        self._digest.update(self._idx_path.read_bytes())
        return self._digest.hexdigest()

    def _flush(self) -> None:
        if self._waiting:
            block = np.concatenate(self._waiting).astype(self._dtype).tobytes()
            _append(self._bin_path, block)
            self._digest.update(block)
            self._waiting.clear()
            self._waiting_tokens = 0


def open_split(corpus: Corpus, name: str, split: Split) -> IndexedDataset:
    """Megatron's reader over one split of a domain; item i is document i's tokens.

    Raises:
        UserError: if the files are not a Megatron data set of as many documents and tokens as
            corpus.json says.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix, expected = corpus.prefix(name, split), corpus.domains[name].split(split)
    # Before Megatron opens it: its reader tells these by assertions, and half-opened it leaves a
    # traceback on the screen when it is collected.
    _check_header(prefix, corpus.dtype, expected.documents)
    indexed = IndexedDataset(str(prefix))
    tokens = int(indexed.sequence_lengths.sum(dtype=np.int64))
    if tokens != expected.tokens:
        raise _not_readable(prefix, f"it counts {tokens} tokens, not {expected.tokens}")
    return indexed


def _check_header(prefix: Path, dtype: TokenType, documents: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    expected = {
        "kind": _MAGIC,
        "version": _VERSION,
        "token type": DType.code_from_dtype(np.dtype(dtype).type),
        "number of documents": documents,
        "number of document boundaries": documents + 1,
    }
    try:
        with prefix.with_name(prefix.name + ".idx").open("rb") as stream:
            found = _HEADER.unpack(stream.read(_HEADER.size))
    except (OSError, struct.error) as error:
        raise _not_readable(prefix, str(error)) from error
    for (field, value), other in zip(expected.items(), found, strict=True):
        if other != value:
            raise _not_readable(prefix, f"its {field} is {other!r}, not {value!r}")


def _append(path: Path, block: bytes) -> None:
    stream: BinaryIO
    try:
        with path.open("ab") as stream:
            stream.write(block)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
    )


def _not_readable(prefix: Path, problem: str) -> UserError:
    return UserError(
        f"{prefix}.idx is not what corpus.json says: {problem}; restore it or preprocess again"
    )
