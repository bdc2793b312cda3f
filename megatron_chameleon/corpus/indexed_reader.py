"""Megatron's .bin/.idx files, opened with everything checked that can be checked without hashing.

An .idx holds, little-endian: the magic, the version (u64), the code of the token type (u8), the
numbers of sequences and of document boundaries (u64 each), then the length of each sequence in
tokens (i32), where it begins in the .bin in bytes (i64), and the sequence at which each document
begins, with their number at the end (i64).

megatron.core is imported inside the function that needs it: it takes seconds.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, DomainSplit, Split
from megatron_chameleon.corpus.block_checksums import BlockTokens, open_checksums
from megatron_chameleon.corpus.indexed_writer import HEADER, MAGIC, VERSION
from megatron_chameleon.corpus.mapped_file import map_file
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

# Megatron's codes of integers. It also has codes of float64 (6) and float32 (7).
_TOKEN_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
# Sequences checked at a time: the work on a block stays in the processor's cache.
_BLOCK = 1 << 15
_WAY_OUT = "restore it or preprocess again"


@dataclasses.dataclass(frozen=True)
class ExpectedTokens:
    """What corpus.json says of a pair of files in which every document is one sequence.

    ``block_checksums`` is the SHA-256 of the .xxh3 file; None if the corpus has none.
    """

    dtype: str
    documents: int
    tokens: int
    block_checksums: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """A pair of .bin/.idx files, mapped: sequences of tokens, one after another.

    All arrays are read-only and lie on disk; no file stays open. Those of the .idx are not aligned
    in memory, since its header is 34 bytes long. Tokens are checked when they are first read.

    Attributes:
        prefix: path of the files, without their suffix.
        tokens: [num_tokens], of the type on disk; sequence i is the ``lengths[i]`` tokens from
            ``starts[i]`` on, and sequence i + 1 follows it.
        lengths: [num_sequences] int32, in tokens; none is negative, some may be 0.
        pointers: [num_sequences] int64, where each sequence begins, in bytes.
        document_boundaries: [num_documents + 1] int64; document d is the sequences from
            ``document_boundaries[d]`` to ``document_boundaries[d + 1]`` - 1.
    """

    prefix: Path
    tokens: BlockTokens
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    document_boundaries: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of a token on disk."""
        return self.tokens.dtype

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """[num_sequences] int64, where each sequence begins in ``tokens``.

        Made when first asked for, and then held in memory (8 bytes a sequence).
        """
        return self.pointers // self.dtype.itemsize

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Tokens of one sequence, all of them or ``length`` from ``offset`` on.

        Raises:
            IndexError: if it does not have as many, or there is no such sequence.
            UserError: if the tokens are damaged or outside of the vocabulary.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        size = int(self.lengths[sequence])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of a sequence of {size}")
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]


def open_token_file(
    prefix: Path, expected: ExpectedTokens | None = None, vocab_size: int | None = None
) -> TokenFile:
    """Map a pair of .bin/.idx files, as megatron.core's IndexedDatasetBuilder writes them.

    Whatever the files hold, what is returned can be read without stepping outside of them. The .idx
    is checked whole; tokens when they are first read, see :class:`BlockTokens`. Tokens without
    checksums that were changed in place are only detected outside of the vocabulary.

    Args:
        prefix: path of the files, without their suffix.
        expected: what they hold, if it is known.
        vocab_size: one more than the largest token id; None to read any.

    Raises:
        UserError: naming the file, what is wrong with it and what to do.
    """
    idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    content, bin_content = _map(idx_path), _map(bin_path)
    dtype, num_sequences = _check_header(idx_path, content, expected)
    after_lengths = HEADER.size + 4 * num_sequences
    after_pointers = after_lengths + 8 * num_sequences
    lengths = content[HEADER.size : after_lengths].view("<i4")
    pointers = content[after_lengths:after_pointers].view("<i8")
    boundaries = content[after_pointers:].view("<i8")
    size = _check_sequences(idx_path, lengths, pointers, dtype.itemsize, bin_content.size)
    if size != bin_content.size:
        raise UserError(
            f"{bin_path} holds {bin_content.size} bytes where its .idx places tokens up to byte "
            f"{size}: one of them is truncated or of other text; restore both or preprocess again"
        )
    _check_boundaries(idx_path, boundaries, num_sequences, one_each=expected is not None)
    tokens = bin_content.view(dtype)
    if expected and expected.tokens != tokens.size:
        raise _unexpected(idx_path, "number of tokens", tokens.size, expected.tokens)
    checksums = None
    if expected and expected.block_checksums is not None:
        checksums = open_checksums(Path(f"{prefix}.xxh3"), bin_content, content)
    checked = BlockTokens(bin_path, tokens, checksums, vocab_size)
    return TokenFile(prefix, checked, lengths, pointers, boundaries)


def open_tokens(corpus: Corpus, name: str, split: Split) -> TokenFile:
    """One split of a domain; sequence i is document i.

    Raises:
        UserError: if the files are not what corpus.json says.
    """
    part = corpus.domains[name].split(split)
    return open_token_file(
        corpus.prefix(name, split), expected_tokens(corpus, part), corpus.tokenizer.vocab_size
    )


def expected_tokens(corpus: Corpus, part: DomainSplit) -> ExpectedTokens:
    """What ``corpus`` says of one of its splits."""
    return ExpectedTokens(corpus.dtype, part.documents, part.tokens, part.block_checksums)


def open_split(corpus: Corpus, name: str, split: Split) -> IndexedDataset:
    """Megatron's reader over one split of a domain; item i is document i's tokens.

    It keeps three descriptors open: for many domains at a time, see :func:`open_tokens`.

    Raises:
        UserError: if the files are not what corpus.json says, or hold no token.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    # Megatron's reader tells some of what is wrong by assertions and does not see the rest.
    file = open_tokens(corpus, name, split)
    if not file.tokens.size:
        raise UserError(
            f"{file.prefix}.bin holds no tokens: domain '{name}' has none in {split}; give the "
            "split a larger share, or the domain more text, and preprocess again"
        )
    return IndexedDataset(str(file.prefix))


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        return map_file(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing; restore it, or give the path of a .bin/.idx pair without suffix"
        ) from error
    except OSError as error:
        way_out = "make it a file that can be read"
        if error.errno == errno.ENOMEM:
            way_out = "raise the system's limit of maps (vm.max_map_count) or of memory (ulimit -v)"
        raise UserError(f"cannot read {path}: {error.strerror}; {way_out}") from error


def _check_header(
    path: Path, content: NDArray[np.uint8], expected: ExpectedTokens | None
) -> tuple[np.dtype[np.integer], int]:
    """The type of the tokens and the number of sequences; the .idx has the size they ask for."""
    if content.size < HEADER.size:
        raise _damaged(path, f"it ends after {content.size} of the header's {HEADER.size} bytes")
    magic, version, code, sequences, boundaries = HEADER.unpack(content[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged(path, f"its magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise _damaged(path, f"its version is {version}, not {VERSION}")
    if code not in _TOKEN_TYPES:
        codes = ", ".join(f"{known} ({name})" for known, name in _TOKEN_TYPES.items())
        raise _damaged(path, f"its token type is {code}, none of the integers {codes}")
    dtype = np.dtype(_TOKEN_TYPES[code])
    if expected and dtype != np.dtype(expected.dtype):
        raise _unexpected(path, "token type", dtype.name, expected.dtype)
    if expected and sequences != expected.documents:
        raise _unexpected(path, "number of sequences", sequences, expected.documents)
    if not boundaries:
        raise _damaged(path, "its number of document boundaries is 0; there is always one")
    size = HEADER.size + (4 + 8) * sequences + 8 * boundaries  # Python's integers: no overflow
    if content.size != size:
        raise _damaged(
            path,
            f"it holds {content.size} bytes where its number of sequences ({sequences}) and of "
            f"document boundaries ({boundaries}) ask for {size}",
        )
    return dtype, sequences


def _check_sequences(
    path: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    bin_bytes: int,
) -> int:
    """The bytes of all sequences, which follow each other without gaps."""
    size = 0
    for first in range(0, len(lengths), _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64)
        if block.min() < 0:
            place = int(np.argmax(block < 0))
            raise _damaged(path, f"its length {first + place} is {block[place]}, below 0")
        block *= token_bytes
        ends = np.cumsum(block)
        ends += size
        begins = pointers[first : first + _BLOCK].copy()  # aligned, which halves the time
        wrong = begins + block != ends
        if wrong.any():
            place = int(np.argmax(wrong))
            raise _damaged(
                path,
                f"its pointer {first + place} is {begins[place]}, where the lengths before it add "
                f"up to {ends[place] - block[place]} bytes",
            )
        size = int(ends[-1])
        if size > bin_bytes:  # told by the caller; going on, the sum could grow too large
            break
    return size


def _check_boundaries(
    path: Path, boundaries: NDArray[np.int64], num_sequences: int, *, one_each: bool
) -> None:
    """Boundaries rise from 0 to the number of sequences, in steps of 1 if ``one_each``."""
    if boundaries[0] != 0 or boundaries[-1] != num_sequences:
        raise _damaged(
            path,
            f"its document boundaries go from {boundaries[0]} to {boundaries[-1]}, not from 0 to "
            f"{num_sequences}",
        )
    for first in range(0, len(boundaries) - 1, _BLOCK):
        block = boundaries[first : first + _BLOCK + 1].copy()
        wrong = np.diff(block) != 1 if one_each else block[1:] < block[:-1]
        if wrong.any():
            place = int(np.argmax(wrong))
            raise _damaged(
                path,
                f"its document boundary {first + place + 1} is {block[place + 1]} after "
                f"{block[place]}, which is not {'1 more' if one_each else 'as much or more'}",
            )


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged, or no Megatron index: {problem}; {_WAY_OUT}")


def _unexpected(path: Path, field: str, found: object, asked: object) -> UserError:
    return UserError(
        f"{path} is not what corpus.json says: its {field} is {found}, not {asked}; {_WAY_OUT}"
    )
