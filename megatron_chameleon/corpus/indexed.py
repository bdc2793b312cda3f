"""Megatron's .bin/.idx files: writing one split of a domain, and opening it again.

megatron.core is imported inside the functions: it takes seconds, which ``--help`` and a misspelt
path should not wait for.
"""

from __future__ import annotations

import array
import hashlib
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
    problem = ""
    try:
        indexed = IndexedDataset(str(prefix))
        if indexed.index.dtype != np.dtype(corpus.dtype):
            problem = f"its tokens are not {corpus.dtype}"
        elif len(indexed) != expected.documents:
            problem = f"it has {len(indexed)} documents, not {expected.documents}"
        elif int(indexed.sequence_lengths.sum(dtype=np.int64)) != expected.tokens:
            problem = f"its documents do not add up to {expected.tokens} tokens"
    # Megatron's reader tells a bad header by an assertion, an impossible count by a ValueError.
    except (AssertionError, OSError, ValueError) as error:
        raise _not_readable(prefix, str(error)) from error
    if problem:
        raise _not_readable(prefix, problem)
    return indexed


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
