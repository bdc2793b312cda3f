"""Checksums of the blocks of a corpus's token files, and tokens that are checked by them when read.

Beside PREFIX.bin and PREFIX.idx, PREFIX.xxh3 holds the 64-bit XXH3 hash, little-endian, of every
``BLOCK_BYTES`` of the .bin and then of the .idx; the last block of each file may be shorter.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES, num_blocks
from megatron_chameleon.corpus.mapped_file import map_file
from megatron_chameleon.errors import UserError

# From so many blocks on, the flags of a file are mapped.
_MAPPED_BLOCKS = 1 << 16
_HINT = "restore it or preprocess again"


class BlockHasher:
    """Hashes a stream of bytes block by block."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._finished = bytearray()

    def update(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes to the stream."""
        view = memoryview(content).cast("B")
        first = 0
        while first < len(view):
            part = view[first : first + BLOCK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            first += len(part)
            if self._filled == BLOCK_BYTES:
                self.end_block()

    def end_block(self) -> None:
        """End the block that has been begun, if one has."""
        if self._filled:
            self._finished += self._hash.intdigest().to_bytes(8, "little")
            self._hash.reset()
            self._filled = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the next :meth:`take` returns."""
        return len(self._finished)

    def take(self) -> bytes:
        """The checksums of the blocks finished since the last call."""
        taken = bytes(self._finished)
        self._finished = bytearray()
        return taken


class BlockTokens:
    """Tokens on disk; every block is checked the first time that any of it is read.

    Reading is indexing, by a slice of step 1 or by an array of positions from 0 on; both raise
    UserError for a block that does not match its checksum or holds an id outside the vocabulary.

    Args:
        path: of the .bin, for messages.
        unchecked: [num_tokens], of an integer type.
        checksums: [num_blocks] uint64; None where there are none to check.
        vocab_size: ids go from 0 to one less; None where they are not checked.

    Attributes:
        checked: [num_blocks] uint8, 1 for each block that needs no check any more.
    """

    def __init__(
        self,
        path: Path,
        unchecked: NDArray[np.integer],
        checksums: NDArray[np.uint64] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._path, self.unchecked = path, unchecked
        self._checksums, self._vocab_size = checksums, vocab_size
        self._block = BLOCK_BYTES // unchecked.itemsize
        blocks = num_blocks(unchecked.nbytes)
        if checksums is None and vocab_size is None:
            self.checked = np.ones(blocks, np.uint8)
        elif blocks < _MAPPED_BLOCKS:
            self.checked = np.zeros(blocks, np.uint8)
        else:
            # Pages that are never written take no memory: for 15T tokens that would be 2 GB.
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
            assert step == 1, "blocks are checked in the order of their tokens"
            first, last = start // self._block, -(-stop // self._block)
            self.check(first + np.flatnonzero(self.checked[first:last] == 0))
        else:
            if np.min(key, initial=0) < 0:
                raise IndexError("positions of tokens are not negative")
            blocks = np.atleast_1d(key) // self._block
            self.check(np.unique(blocks[self.checked[blocks] == 0]))
        return self.unchecked[key]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.integer]:
        return np.array(self[:], dtype=dtype, copy=copy)  # type: ignore[call-overload]

    def check(self, blocks: NDArray[np.int64]) -> None:
        """Check those of ``blocks`` that have not been checked.

        Raises:
            UserError: naming the file and the block.
        """
        for block in blocks[self.checked[blocks] == 0].tolist():
            content = self.unchecked[block * self._block : (block + 1) * self._block]
            if self._checksums is not None:
                check_block(self._path, content, block, int(self._checksums[block]))
            if self._vocab_size is not None:
                self._check_ids(content)
            self.checked[block] = 1

    def _check_ids(self, content: NDArray[np.integer]) -> None:
        assert self._vocab_size is not None
        # Read as unsigned, a negative id is a large one: one pass over the block is enough.
        if content.view(f"u{content.itemsize}").max() >= self._vocab_size:
            outside = content[(content < 0) | (content >= self._vocab_size)][0]
            raise UserError(
                f"{self._path} holds token {outside}, outside of the vocabulary of "
                f"{self._vocab_size}: it is damaged or of another tokenizer; {_HINT}"
            )


# Tokens on disk, or in memory.
Tokens = BlockTokens | NDArray[np.integer]


def open_checksums(
    path: Path, tokens: NDArray[np.uint8], index: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    """Map the checksums of a .bin, and check the .idx by its own.

    The checksums of a .bin are read with the blocks: of a corpus of trillions of tokens they take
    gigabytes. Damage to them looks like damage to a block.

    Args:
        path: of both, with the suffix ``.xxh3``.
        tokens: bytes of the .bin.
        index: bytes of the .idx.

    Returns:
        [num_blocks] of the .bin.

    Raises:
        UserError: if the file does not fit the others, or a block of the .idx is damaged.
    """
    try:
        content = map_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {_HINT}") from error
    bin_blocks = num_blocks(tokens.size)
    if content.size != 8 * (bin_blocks + num_blocks(index.size)):
        raise UserError(f"{path} does not have the size of its .bin's checksums; {_HINT}")
    checksums = content.view("<u8")
    for block, checksum in enumerate(checksums[bin_blocks:].tolist()):
        content = index[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        check_block(path.with_suffix(".idx"), content, block, checksum)
    return checksums[:bin_blocks]


def check_block(path: Path, content: NDArray[np.integer], block: int, checksum: int) -> None:
    """Raises UserError, naming file and block, if ``content`` does not hash to ``checksum``."""
    if xxhash.xxh3_64_intdigest(content.data) != checksum:
        first = block * BLOCK_BYTES
        raise UserError(
            f"{path}: bytes {first} to {first + content.nbytes - 1} (block {block}) do not match "
            f"their checksum in the .xxh3: one of them is damaged; {_HINT}"
        )
