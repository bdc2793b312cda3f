"""Megatron's .bin/.idx token files: writer, reader, and checksums of every 16 KiB block.

An .idx holds, little-endian: the magic, the version (u64), the token type's code (u8), the number
of sequences and of document boundaries (u64 each), then the length of each sequence in tokens
(i32), its start in the .bin in bytes (i64), and the first sequence of each document followed by the
number of sequences (i64).

PREFIX.xxh3 next to them holds the 64-bit XXH3 hash, little-endian, of every ``BLOCK_BYTES`` of the
.bin and then of the .idx; the last block of each file may be shorter.

megatron.core is not imported, since importing it takes seconds. The tests compare these files with
the files that megatron.core's IndexedDatasetBuilder writes.

The files may be in object storage: the .idx is downloaded, and chunks of the .bin are copied to a
local file when they are first read. megatron.core's reader for object storage is not used, since it
reads 256 MiB for each document of a shuffled order, and downloads the .idx at every start.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import hashlib
import mmap
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_chameleon.artifacts import DomainSplit
from megatron_chameleon.artifacts.corpus import BLOCK_BYTES, num_blocks
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.artifacts.object_cache import HINT, cache_entry, cached_file
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import (
    FileState,
    Location,
    file_state,
    location,
    read_ranges,
    reading,
)

TokenType = Literal["uint16", "int32"]
# The header of an .idx holds the magic, the version, the code of the token type, the number of
# sequences and the number of document boundaries.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Megatron's code of each integer type. Its codes of float64 (6) and float32 (7) are omitted, since
# tokens are integers.
_TOKEN_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
TYPE_CODES: dict[TokenType, int] = {"uint16": 8, "int32": 4}
# Smallest vocabulary for which Megatron-LM uses 32-bit integers; uint16 would hold 65,536 ids.
_UINT16_VOCABULARY = 65_500

_BUFFER_BYTES = 1 << 20
# Number of index entries that are written at a time.
_INDEX_BLOCK = 1 << 17
# Number of sequences that are checked at a time, small enough for the processor's cache.
_CHECK_BLOCK = 1 << 15
# Smaller files are read into memory, which is cheaper than mapping them.
_SMALL_FILE_BYTES = 1 << 14
_MAP_FAILED = ctypes.c_void_p(-1).value
_HINT = "restore it or preprocess again"
# Bytes of a .bin in object storage that are requested together. The documents of a sample are at
# random positions; for 1 MiB, a request to S3 still takes little longer than for a few bytes.
_CHUNK_BYTES = 1 << 20
# If a file has at least this many blocks, the flags of its verified blocks are in an anonymous
# memory map.
_MAPPED_BLOCKS = 1 << 16


def token_type(vocab_size: int) -> TokenType:
    """Return Megatron's integer type for a vocabulary: uint16 below 65,500 ids, otherwise int32."""
    return "uint16" if vocab_size < _UINT16_VOCABULARY else "int32"


# Writing


class IndexedWriter:
    """Write one pair of .bin/.idx files and their checksums; each document is one sequence.

    Memory use is bounded, and no file stays open, so any number of writers can be used
    concurrently.

    Attributes:
        documents: number of documents added.
        tokens: number of tokens added, end-of-document tokens included.
        block_checksums: hex SHA-256 of the .xxh3 file, valid after :meth:`finish`.

    Args:
        prefix: path of the files, without suffix; they must not exist.
        dtype: integer type of a token on disk.
    """

    def __init__(self, prefix: Path, dtype: TokenType) -> None:
        self._bin_path, self._idx_path, self._checksums_path = (
            prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".xxh3")
        )
        self._type = dtype
        self._dtype = np.dtype(dtype)
        self._tokens, self._lengths, self._checksums = bytearray(), bytearray(), bytearray()
        self._digest, self._checksums_digest = hashlib.sha256(), hashlib.sha256()
        self._block, self._block_bytes = xxhash.xxh3_64(), 0
        self.documents = 0
        self.tokens = 0
        for path in (self._bin_path, self._idx_path, self._checksums_path):
            # An existing file may be a hard link to another corpus's tokens.
            with writing(path), path.open("xb") as stream:
                if path is self._idx_path:
                    # The header stays blank until the end, so an unfinished file is not a valid
                    # index.
                    stream.write(bytes(HEADER.size))

    def add(self, tokens: NDArray[np.integer]) -> None:
        """Append one document [num_tokens], its end-of-document token included.

        Raises:
            UserError: if the disk is full.
        """
        self.add_tokens(tokens.astype(self._dtype).tobytes())
        self.add_lengths(np.array([tokens.size], dtype=np.int32))

    def add_tokens(self, tokens: bytes | memoryview) -> None:
        """Append tokens in their on-disk type; ``add_lengths`` divides them into documents."""
        self._tokens += tokens
        if len(self._tokens) >= _BUFFER_BYTES:
            self.flush()

    def add_lengths(self, lengths: NDArray[np.int32]) -> None:
        """Append documents of ``lengths`` [num_documents] tokens."""
        self._lengths += lengths.tobytes()
        self.documents += lengths.size
        self.tokens += int(lengths.sum(dtype=np.int64))

    def flush(self) -> None:
        """Write the buffers to disk.

        Raises:
            UserError: if the disk is full.
        """
        if self._tokens:
            self._hash(self._tokens)
            append_to(self._bin_path, self._tokens)
            self._tokens = bytearray()
        if self._lengths:
            append_to(self._idx_path, self._lengths)
            self._lengths = bytearray()

    def finish(self) -> str:
        """Write the remaining tokens and the index; return the SHA-256 of .bin followed by .idx.

        Raises:
            UserError: if the disk is full.
        """
        self.flush()
        self._end_block()
        with writing(self._idx_path), self._idx_path.open("r+b") as stream:
            self._write_pointers_and_boundaries(stream)
            stream.seek(0)
            code = TYPE_CODES[self._type]
            stream.write(HEADER.pack(MAGIC, VERSION, code, self.documents, self.documents + 1))
            stream.seek(0)
            while block := stream.read(_BUFFER_BYTES):
                self._hash(block)
        self._end_block()
        self._write_checksums()
        return self._digest.hexdigest()

    @property
    def block_checksums(self) -> str:
        """Hex SHA-256 of the .xxh3 file."""
        return self._checksums_digest.hexdigest()

    def _hash(self, content: bytes | bytearray) -> None:
        self._digest.update(content)
        left = memoryview(content)
        while left:
            part = left[: BLOCK_BYTES - self._block_bytes]
            left = left[len(part) :]
            self._block.update(part)
            self._block_bytes += len(part)
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()
        if len(self._checksums) >= _BUFFER_BYTES:
            self._write_checksums()

    def _end_block(self) -> None:
        if self._block_bytes:
            self._checksums += self._block.intdigest().to_bytes(8, "little")
            self._block.reset()
            self._block_bytes = 0

    def _write_checksums(self) -> None:
        append_to(self._checksums_path, self._checksums)
        self._checksums_digest.update(self._checksums)
        self._checksums = bytearray()

    def _write_pointers_and_boundaries(self, stream: BinaryIO) -> None:
        """Complete the index from the lengths that the file already contains."""
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
        stream.seek(HEADER.size + 12 * self.documents)
        for first in range(0, self.documents + 1, _INDEX_BLOCK):
            last = min(first + _INDEX_BLOCK, self.documents + 1)
            stream.write(np.arange(first, last, dtype=np.int64).tobytes())


def append_to(path: Path, block: bytes | bytearray | memoryview) -> None:
    """Append ``block`` to a file; raises UserError if the disk is full."""
    with writing(path), path.open("ab") as stream:
        stream.write(block)


def write_at(path: Path, start: int, block: bytes) -> None:
    """Write ``block`` from byte ``start`` of a file; raises UserError if the disk is full."""
    with writing(path), path.open("r+b", buffering=0) as stream:
        stream.seek(start)
        stream.write(block)


# Mapping


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a file as [size] uint8, read-only, without keeping a file descriptor.

    ``mmap.mmap`` and ``numpy.memmap`` hold a descriptor as long as the map exists. With two files
    per domain and split, a thousand domains would exceed the limit on open files (often 1024). The
    map exists as long as the array or any view of it. The system also limits the number of maps of
    a process (Linux: vm.max_map_count, 65,530 by default). Small files are therefore read into
    memory instead, which allows corpora of tens of thousands of domains. If a mapped file is
    truncated, reading the lost part kills the process, so files must be replaced and not rewritten
    in place.

    Raises:
        OSError: if the file does not exist, is not a regular file, or cannot be read or mapped.
    """
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if size <= _SMALL_FILE_BYTES:
            with open(descriptor, "rb", closefd=False) as stream:
                return np.frombuffer(stream.read(), np.uint8)
        library = _c_library()
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"Cannot map {size} bytes: {os.strerror(number)}", str(path))
    finally:
        os.close(descriptor)
    memory = (ctypes.c_char * size).from_address(address)
    # At exit the system unmaps the file; doing so earlier could break other threads that read it.
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    # The pages are read-only: prevent setting the array writeable.
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


@functools.cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


# Reading


class SparseCopy:
    """A sparse local file with the chunks of a remote file that were read so far.

    After the content, from a multiple of 8 bytes on, it holds the 64-bit XXH3 hash of every chunk,
    or 0 for a chunk that was not read. Processes of a machine share the file without locks, and
    later runs reuse it: a chunk that does not match its hash, since the machine failed while it was
    written, is read again.

    Attributes:
        content: [size] uint8, zero where no chunk was read; :meth:`fetch` reads chunks.

    Args:
        url: URL of a file of at least one chunk.
        state: its current state.
        cache: folder of the copy; None for the default folder.

    Raises:
        UserError: if the copy cannot be created.
    """

    def __init__(self, url: str, state: FileState, cache: Path | None) -> None:
        self._url, self._state = url, state
        self._copy = cache_entry(url, state, cache)
        chunks = -(-state.bytes // _CHUNK_BYTES)
        self._hashes_start = -(-state.bytes // 8) * 8
        with writing(self._copy):
            self._copy.parent.mkdir(parents=True, exist_ok=True)
            with self._copy.open("ab") as stream:
                stream.truncate(self._hashes_start + 8 * chunks)
        mapped = _map(self._copy)  # shows what other processes write
        self.content = mapped[: state.bytes]
        self._hashes = mapped[self._hashes_start :].view("<u8")
        self._is_read = np.zeros(chunks, np.bool_)

    def fetch(self, starts: NDArray[np.int64], size: int) -> None:
        """Read the missing chunks of the ranges from ``starts`` [n] to ``starts`` + ``size``.

        Args:
            starts: first byte of each range.
            size: bytes of a range, at most a chunk.

        Raises:
            UserError: if they cannot be read, the remote file has changed, or the disk is full.
        """
        last = np.minimum(starts + size, self.content.size) - 1
        wanted = np.unique(np.concatenate([starts, last]) // _CHUNK_BYTES)
        missing = [c for c in wanted[~self._is_read[wanted]].tolist() if not self._is_copied(c)]
        if missing:
            self._copy_chunks(missing)
        self._is_read[wanted] = True

    def _copy_chunks(self, chunks: list[int]) -> None:
        ranges = [self._range(chunk) for chunk in chunks]
        with reading(self._url, HINT):
            for (start, _), content in zip(ranges, read_ranges(self._url, ranges), strict=True):
                digest = xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")
                write_at(self._copy, start, content)
                write_at(self._copy, self._hashes_start + 8 * (start // _CHUNK_BYTES), digest)
            if file_state(self._url, refresh=True) != self._state:
                raise UserError(f"{self._url} has changed since it was opened; run again")

    def _range(self, chunk: int) -> tuple[int, int]:
        start = chunk * _CHUNK_BYTES
        return start, min(start + _CHUNK_BYTES, self.content.size)

    def _is_copied(self, chunk: int) -> bool:
        expected, content = int(self._hashes[chunk]), self.content[slice(*self._range(chunk))]
        return expected != 0 and xxhash.xxh3_64_intdigest(content.data) == expected


class BlockTokens:
    """Tokens on disk; every block is verified when one of its tokens is first read.

    The index must be a slice of step 1 or an array of positions >= 0. Indexing raises UserError for
    a block that does not match its checksum or holds an id outside the vocabulary.

    Args:
        path: path or URL of the .bin, for messages.
        unchecked: unverified tokens, [num_tokens], of an integer type; those of a remote block are
            valid after :meth:`check`.
        checksums: [num_blocks] uint64; None for a corpus without checksums.
        vocab_size: ids must be in [0, vocab_size); None to skip the check.
        copy: the copy of a remote file that ``unchecked`` is a view of, from which a block is
            fetched before it is verified; None for other tokens.
        first_byte: position of ``unchecked`` in ``copy``, in bytes.

    Attributes:
        checked: [num_blocks] uint8, 1 for each verified block.
    """

    def __init__(
        self,
        path: Location,
        unchecked: NDArray[np.integer],
        checksums: NDArray[np.uint64] | None = None,
        vocab_size: int | None = None,
        copy: SparseCopy | None = None,
        first_byte: int = 0,
    ) -> None:
        self._path, self.unchecked = path, unchecked
        self._checksums, self._vocab_size = checksums, vocab_size
        self._copy, self._first_byte = copy, first_byte
        self._block = BLOCK_BYTES // unchecked.itemsize
        blocks = num_blocks(unchecked.nbytes)
        if checksums is None and vocab_size is None and copy is None:
            self.checked = np.ones(blocks, np.uint8)
        elif blocks < _MAPPED_BLOCKS:
            self.checked = np.zeros(blocks, np.uint8)
        else:
            # Pages of an anonymous map take no memory until they are written, whereas an array of
            # flags for 15T tokens would take 2 GB.
            self.checked = np.frombuffer(mmap.mmap(-1, blocks, mmap.MAP_PRIVATE), np.uint8)

    def __len__(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.unchecked.size

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of a token on disk."""
        return self.unchecked.dtype

    def __getitem__(self, key: slice | NDArray[np.integer]) -> NDArray[np.integer]:
        if isinstance(key, slice):
            start, stop, step = key.indices(self.size)
            assert step == 1, "blocks are verified in the order of their tokens"
            first, last = start // self._block, -(-stop // self._block)
            self.check(first + np.flatnonzero(self.checked[first:last] == 0))
        else:
            if np.min(key, initial=0) < 0:
                raise IndexError("token positions must not be negative")
            blocks = np.atleast_1d(key) // self._block
            self.check(np.unique(blocks[self.checked[blocks] == 0]))
        return self.unchecked[key]

    def part(self, start: int, stop: int) -> BlockTokens:
        """Return tokens ``start`` to ``stop``, of which blocks are verified separately.

        Only the vocabulary is checked, since a part may begin within a block.
        """
        assert self._checksums is None, "blocks with checksums cannot be divided"
        first_byte = self._first_byte + start * self.dtype.itemsize
        tokens, size = self.unchecked[start:stop], self._vocab_size
        return BlockTokens(self._path, tokens, None, size, self._copy, first_byte)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.integer]:
        return np.array(self[:], dtype=dtype, copy=copy)  # type: ignore[call-overload]

    def check(self, blocks: NDArray[np.int64]) -> None:
        """Verify the ``blocks`` that have not been verified yet; fetch them if they are remote.

        Raises:
            UserError: if a block is damaged or cannot be read, naming the file.
        """
        blocks = blocks[self.checked[blocks] == 0]
        if self._copy is not None and blocks.size:
            self._copy.fetch(self._first_byte + blocks * BLOCK_BYTES, BLOCK_BYTES)
        for block in dict.fromkeys(blocks.tolist()):
            content = self.unchecked[block * self._block : (block + 1) * self._block]
            if self._checksums is not None:
                _check_block(self._path, content, block, int(self._checksums[block]))
            # As an unsigned integer, a negative id is large, so one pass over the block finds both
            # errors.
            if (
                self._vocab_size is not None
                and content.view(f"u{content.itemsize}").max() >= self._vocab_size
            ):
                outside = content[(content < 0) | (content >= self._vocab_size)][0]
                raise UserError(
                    f"{self._path} holds token {outside}, outside the vocabulary of "
                    f"{self._vocab_size}: it is damaged or was made by another tokenizer; {_HINT}"
                )
            self.checked[block] = 1


# Tokens on disk (BlockTokens) or in memory (an array).
Tokens = BlockTokens | NDArray[np.integer]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """A mapped pair of .bin/.idx files: consecutive sequences of tokens.

    All arrays are read-only and on disk; no file stays open. Of a .bin in object storage, only the
    chunks that were read are on disk. The arrays of the .idx are not aligned in memory, since its
    header is 34 bytes long. Tokens are verified when they are first read.

    Attributes:
        prefix: path or URL of the files, without suffix.
        tokens: [num_tokens], of the type on disk; sequence i is the ``lengths[i]`` tokens from
            ``starts[i]`` on, and sequence i + 1 follows it.
        lengths: [num_sequences] int32, in tokens, >= 0; int64 if sequences were joined.
        pointers: [num_sequences] int64, start of each sequence in bytes.
        document_boundaries: [num_documents + 1] int64; document d consists of the sequences from
            ``document_boundaries[d]`` to ``document_boundaries[d + 1]`` - 1. A file without
            document boundaries has only the entry 0.
    """

    prefix: Location
    tokens: BlockTokens
    lengths: NDArray[np.integer]
    pointers: NDArray[np.int64]
    document_boundaries: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def has_documents(self) -> bool:
        """Whether the file divides its sequences into documents; one for all does not count."""
        return len(self.document_boundaries) > 2 or len(self) == 1

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of a token on disk."""
        return self.tokens.dtype

    @functools.cached_property
    def _has_one_each(self) -> bool:
        """Whether every document is one sequence; compared in blocks, which takes no memory."""
        bounds = self.document_boundaries
        return len(bounds) == len(self) + 1 and all(
            (np.diff(bounds[block : block + _CHECK_BLOCK + 1]) == 1).all()
            for block in range(0, len(self), _CHECK_BLOCK)
        )

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """[num_sequences] int64, start of each sequence in ``tokens``.

        Computed on first use and then held in memory (8 bytes a sequence).
        """
        return self.pointers // self.dtype.itemsize

    @functools.cached_property
    def document_edges(self) -> NDArray[np.int64]:
        """[num_documents + 1] int64, first token of each document in ``tokens``, and the end.

        Of a file without document boundaries, the sequences are documents.
        """
        edges = np.append(self.starts, self.tokens.size)
        return edges[self.document_boundaries] if self.has_documents else edges

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Return all tokens of a sequence, or ``length`` tokens from position ``offset`` on.

        Raises:
            IndexError: if the sequence does not exist or has fewer tokens.
            UserError: if the tokens are damaged or outside the vocabulary.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        size = int(self.lengths[sequence])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of a sequence with {size} tokens")
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]

    def num_tokens(self, first: int, stop: int) -> int:
        """Number of tokens in sequences ``first`` to ``stop`` - 1."""
        return int(self.lengths[first:stop].sum(dtype=np.int64))

    def part(self, first: int, stop: int) -> TokenFile:
        """Return sequences ``first`` to ``stop`` - 1, of the same ``tokens``, without documents."""
        lengths, pointers = self.lengths[first:stop], self.pointers[first:stop]
        return TokenFile(self.prefix, self.tokens, lengths, pointers, np.zeros(1, np.int64))

    def documents(self, first: int, stop: int) -> TokenFile:
        """Return sequences ``first`` to ``stop`` - 1 as a file with one sequence per document.

        A document that crosses the ends of the range is cut there. Every sequence is a document
        if the file has no document boundaries.
        """
        size = self.dtype.itemsize
        begin = int(self.pointers[first]) if first < len(self) else self.tokens.size * size
        end = begin + self.num_tokens(first, stop) * size
        lengths, pointers = self.lengths[first:stop], self.pointers[first:stop]
        if self.has_documents and not self._has_one_each and first < stop:
            bounds = self.document_boundaries
            inside = slice(*np.searchsorted(bounds, (first, stop), side="left"))
            edges = np.append(first, bounds[inside])
            edges = edges[np.diff(edges, prepend=-1) > 0]  # leave out documents without sequences
            lengths = np.add.reduceat(lengths, edges - first, dtype=np.int64)
            pointers = self.pointers[edges]
        return TokenFile(
            prefix=self.prefix,
            tokens=self.tokens.part(begin // size, end // size),
            lengths=lengths,
            pointers=pointers - begin if begin else pointers,
            document_boundaries=np.arange(len(lengths) + 1),
        )


def in_memory(path: Location, tokens: NDArray[np.integer], lengths: NDArray[np.int32]) -> TokenFile:
    """Return the token file of documents in memory.

    Args:
        path: location of the text, for messages.
        tokens: [num_tokens] concatenated tokens of all documents.
        lengths: [num_documents] tokens of each document.
    """
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.dtype.itemsize
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    return TokenFile(path, BlockTokens(path, tokens), lengths, pointers, boundaries)


def open_token_file(
    prefix: Location,
    dtype: str | None = None,
    recorded: DomainSplit | None = None,
    vocab_size: int | None = None,
    cache: Path | None = None,
) -> TokenFile:
    """Map a pair of .bin/.idx files, as megatron.core's IndexedDatasetBuilder writes them.

    Reads never leave the bounds of the files, even if the files are damaged. The .idx is verified
    completely, and tokens are verified when they are first read (:class:`BlockTokens`). Without
    checksums, tokens that were changed in place are detected only if they are outside the
    vocabulary.

    Args:
        prefix: path or URL of the files, without suffix.
        dtype: recorded type of a token, if known.
        recorded: record of the files, with one sequence per document, if they belong to a corpus.
        vocab_size: largest token id plus one; None to accept any.
        cache: folder of the local copies of remote files; None for the default folder.

    Raises:
        UserError: naming the file, the problem and the fix.
    """
    idx_path, bin_path = location(f"{prefix}.idx"), location(f"{prefix}.bin")
    hint = "restore it, or pass the path of a .bin/.idx pair without suffix"
    copy = None
    if isinstance(bin_path, Path):
        content, bin_content = _map(Path(idx_path), hint), _map(bin_path, hint)
    else:
        with reading(bin_path, hint):
            state = file_state(bin_path)
        content = _map(cached_file(str(idx_path), cache))
        if state.bytes > _CHUNK_BYTES:
            copy = SparseCopy(bin_path, state, cache)
        bin_content = copy.content if copy else _map(cached_file(bin_path, cache))
    if content.size < HEADER.size:
        raise _damaged(idx_path, f"it ends after {content.size} bytes, within the header")
    header = HEADER.unpack(content[: HEADER.size].tobytes())
    magic, version, code, num_sequences, num_boundaries = header
    if (magic, version) != (MAGIC, VERSION) or code not in _TOKEN_TYPES:
        raise _damaged(idx_path, f"its magic, version and token type are {header[:3]}")
    found_type = np.dtype(_TOKEN_TYPES[code])
    after_lengths = HEADER.size + 4 * num_sequences  # Python's integers: no overflow
    after_pointers = after_lengths + 8 * num_sequences
    if not num_boundaries or content.size != after_pointers + 8 * num_boundaries:
        counts = f"{num_sequences} sequences and {num_boundaries} document boundaries"
        raise _damaged(idx_path, f"it has {content.size} bytes, which do not fit its {counts}")
    if recorded is not None:
        for field, found, expected in (
            ("token type", found_type.name, dtype),
            ("number of sequences", num_sequences, recorded.documents),
            ("number of tokens", bin_content.size // found_type.itemsize, recorded.tokens),
        ):
            if found != expected:
                raise UserError(
                    f"{idx_path} does not match corpus.json: its {field} is {found}, not "
                    f"{expected}; {_HINT}"
                )
    lengths = content[HEADER.size : after_lengths].view("<i4")
    pointers = content[after_lengths:after_pointers].view("<i8")
    boundaries = content[after_pointers:].view("<i8")
    size = _check_sequences(idx_path, lengths, pointers, found_type.itemsize, bin_content.size)
    if size != bin_content.size:
        raise UserError(
            f"{bin_path} holds {bin_content.size} bytes, but its .idx places tokens up to byte "
            f"{size}: one of the two files is truncated or belongs to other text; restore both or "
            "preprocess again"
        )
    _check_boundaries(idx_path, boundaries, num_sequences, one_each=recorded is not None)
    checksums = None
    if recorded and recorded.block_checksums is not None:
        checksums = _open_checksums(Path(f"{prefix}.xxh3"), bin_content, content)
    tokens = BlockTokens(bin_path, bin_content.view(found_type), checksums, vocab_size, copy)
    return TokenFile(prefix, tokens, lengths, pointers, boundaries)


def check_sequences(file: TokenFile, first: int, stop: int, tokens: int) -> None:
    """Check that ``file`` has ``tokens`` tokens in sequences ``first`` to ``stop`` - 1.

    Raises:
        UserError: if it has not, or if the type of its tokens is unsupported.
    """
    require_token_type(file)
    if len(file) < stop or file.num_tokens(first, stop) != tokens:
        raise UserError(
            f"{file.prefix}.idx has changed since it was first read; restore it, or import it again"
        )


def require_token_type(file: TokenFile) -> None:
    """Raise UserError unless the tokens are uint16 or int32."""
    if file.dtype not in (np.uint16, np.int32):
        raise UserError(
            f"{file.prefix}.bin holds tokens of type {file.dtype}, but only uint16 and int32 are "
            "supported; preprocess the data again"
        )


def _map(path: Path, hint: str = _HINT) -> NDArray[np.uint8]:
    try:
        return map_file(path)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            hint = "raise the limit on maps (vm.max_map_count) or on memory (ulimit -v)"
        raise UserError(f"cannot read {path}: {error.strerror}; {hint}") from error


def _open_checksums(
    path: Path, tokens: NDArray[np.uint8], index: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    """Map the checksums of a .bin, [num_blocks], and verify the .idx against its own checksums.

    Each checksum of the .bin is read together with its block, since the checksums of trillions of
    tokens take gigabytes. A damaged checksum is reported as a damaged block.
    """
    content = _map(path)
    bin_blocks = num_blocks(tokens.size)
    if content.size != 8 * (bin_blocks + num_blocks(index.size)):
        raise UserError(f"{path} has the wrong size for the checksums of .bin and .idx; {_HINT}")
    checksums = content.view("<u8")
    for block, checksum in enumerate(checksums[bin_blocks:].tolist()):
        content = index[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        _check_block(path.with_suffix(".idx"), content, block, checksum)
    return checksums[:bin_blocks]


def _check_block(path: Location, content: NDArray[np.integer], block: int, checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(content.data) != checksum:
        first = block * BLOCK_BYTES
        raise UserError(
            f"{path}: bytes {first} to {first + content.nbytes - 1} (block {block}) do not match "
            f"their checksum in the .xxh3 file: one of the two files is damaged; {_HINT}"
        )


def _check_sequences(
    path: Location,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    bin_bytes: int,
) -> int:
    """Check that the sequences follow each other without gaps; return their total bytes."""
    size = 0
    for first in range(0, len(lengths), _CHECK_BLOCK):
        block = lengths[first : first + _CHECK_BLOCK].astype(np.int64) * token_bytes
        ends = size + np.cumsum(block)
        # The copy is aligned in memory, which makes the comparison twice as fast.
        begins = pointers[first : first + _CHECK_BLOCK].copy()
        wrong = (block < 0) | (begins + block != ends)
        if wrong.any():
            place = first + int(np.argmax(wrong))
            raise _damaged(path, f"sequence {place} does not begin where the previous one ends")
        size = int(ends[-1])
        # Stop adding, since the sum could overflow; the caller reports that the size is wrong.
        if size > bin_bytes:
            break
    return size


def _check_boundaries(
    path: Location, boundaries: NDArray[np.int64], num_sequences: int, *, one_each: bool
) -> None:
    """Check that boundaries rise from 0 to ``num_sequences``, in steps of 1 if ``one_each``."""
    if len(boundaries) == 1 and boundaries[0] == 0 and not one_each:
        return  # no document was ever ended
    if (boundaries[0], boundaries[-1]) != (0, num_sequences):
        raise _damaged(path, f"its document boundaries do not go from 0 to {num_sequences}")
    for first in range(0, len(boundaries) - 1, _CHECK_BLOCK):
        block = boundaries[first : first + _CHECK_BLOCK + 1].copy()
        wrong = np.diff(block) != 1 if one_each else block[1:] < block[:-1]
        if wrong.any():
            place = first + 1 + int(np.argmax(wrong))
            raise _damaged(path, f"its document boundary {place} is {boundaries[place]}")


def _damaged(path: Location, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not a Megatron index: {problem}; {_HINT}")
