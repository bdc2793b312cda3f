"""Samples of a domain: their order, the ranges of tokens that they hold, and reading these ranges.

An order is Megatron's indices, or the closed form of an epoch: it gives for each sample the place
where the sample begins in a sequence of documents. One compiled kernel follows the documents from
there, and lists the ranges of tokens in the .bin file. :func:`read_ranges` verifies and copies the
tokens of these ranges; tracing lists the ranges only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.artifacts.files import replacing, sha256_of_json
from megatron_chameleon.corpus.domains import DomainTokens
from megatron_chameleon.corpus.indexed import TokenFile, map_file
from megatron_chameleon.corpus.permutation import permutation_key, permuted
from megatron_chameleon.corpus.windows import numbers_within
from megatron_chameleon.errors import UserError

# Megatron shuffles the last epoch separately if less than this share of it is used, so that its
# repeated documents do not replace documents of the whole epochs.
SEPARATE_FINAL_EPOCH_BELOW = 0.80
# From this number of samples on, Megatron's shuffle index is int64 instead of uint32.
WIDE_SHUFFLE_FROM = np.iinfo(np.uint32).max - 1
# Version in the keys of cached indices. Raise it when megatron_indices returns different indices
# for the same arguments.
MEGATRON_INDICES_VERSION = 1
# document_ends has one entry for this many documents; a search adds up the lengths of the documents
# between two entries.
DOCUMENTS_PER_END = 16

Arrays = dict[str, NDArray[Any]]

# Purposes of permutations. They are hashed into the keys, so that one seed gives independent keys.
_DOCUMENTS, _WINDOWS = 0, 1


@dataclasses.dataclass(frozen=True)
class View:
    """Consecutive samples of a domain, in the order of Megatron's indices or of an epoch's formula.

    Attributes:
        file: documents of the domain.
        first: number of the first sample within the domain.
        num_samples: number of samples.
        find: function that returns for samples [n], numbered from the first one, the position in
            the order of documents and the offset in the document where they begin, [n, 2].
        documents: [m] int32, documents in order; empty if the order is computed from ``keys``.
        keys: [2] keys of the permutations of the documents in the epoch and in the next one.
    """

    file: TokenFile
    first: int
    num_samples: int
    find: Callable[[NDArray[np.int64]], NDArray[np.integer]]
    documents: NDArray[np.int32]
    keys: NDArray[np.uint64]

    def holds(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask [n]: whether each of ``numbers`` [n] is a sample of this view."""
        return (numbers >= self.first) & (numbers < self.first + self.num_samples)

    def ranges(
        self, numbers: NDArray[np.int64], rows: NDArray[np.int64], size: int
    ) -> NDArray[np.int64]:
        """List the ranges of tokens that samples hold, without reading the tokens.

        Args:
            numbers: [n] numbers of samples of this view, within the domain.
            rows: [n] a different number >= 0 for each sample, to label its ranges.
            size: tokens of a sample, with the token after it (s + 1).

        Returns:
            [r, 3] int64: row of the sample, first token in the .bin file, and number of tokens. The
            ranges of a sample follow each other, and have ``size`` tokens in total.
        """
        file, begins = self.file, self.find(numbers - self.first)
        order = file.lengths, file.pointers, file.dtype.itemsize, self.documents, self.keys
        return _list_ranges(*order, begins, rows, size)


def epoch_view(
    domain: DomainTokens,
    file: TokenFile,
    number: int,
    seq_length: int,
    seed: int,
    shuffle_documents: bool,
) -> View:
    """Return a view of the epoch that contains sample ``number`` of a domain.

    The epochs are concatenated to one infinite stream of tokens, so that no token is lost between
    epochs. Window j begins at token ``j * seq_length`` of the stream, and belongs to the epoch in
    which it begins; the windows of an epoch are shuffled. The order depends only on seed,
    ``order_key`` and epoch, not on the number of samples.

    Args:
        domain: domain to read.
        file: sequences of the domain.
        number: number of a sample within the domain.
        seq_length: tokens of a sample.
        seed: seed of the order.
        shuffle_documents: whether the documents are reshuffled every epoch as well. Otherwise they
            stay in file order, or, if the domain is cut, in one shuffled order.
    """
    tokens = domain.tokens
    epoch = number * seq_length // tokens
    first, stop = (-(-e * tokens // seq_length) for e in (epoch, epoch + 1))
    # The last window of an epoch may end in the next epoch.
    orders = (epoch, epoch + 1) if shuffle_documents else (0, 0)
    purposes = (epoch, _WINDOWS), *((each, _DOCUMENTS) for each in orders)
    keys = np.array([permutation_key(seed, domain.order_number, *p) for p in purposes], np.uint64)
    if shuffle_documents or domain.is_cut:
        ends = document_ends(file.lengths, keys[1])
    else:  # the sequences follow each other in the file, like one document
        whole, boundaries, ends = np.array([tokens]), np.arange(2), np.array([tokens])
        file = TokenFile(file.prefix, file.tokens, whole, file.pointers[:1].copy(), boundaries)
    phase = first * seq_length - epoch * tokens
    find = partial(_find_windows, stop - first, seq_length, phase, keys[0], ends)
    return View(file, first, stop - first, find, np.empty(0, np.int32), keys[1:])


def megatron_view(
    domain: DomainTokens,
    file: TokenFile,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache: Path | None = None,
) -> View:
    """Return a view of a domain's samples in the order of Megatron's GPTDataset.

    Args:
        domain: domain to read.
        file: sequences of the domain.
        num_samples: number of samples needed; the order depends on it. Epochs are whole, so the
            view may have more.
        seq_length: tokens of a sample.
        seed: seed of numpy's RandomState.
        cache: folder of cached indices; None keeps them in memory only.

    Raises:
        UserError: if the cache cannot be written.
    """
    # Copy the lengths, which are not aligned in the .idx.
    lengths = np.array(file.lengths, np.int32)

    def build() -> Arrays:
        return megatron_indices(domain.tokens, lengths, num_samples, seq_length, seed)

    key = {
        "order": "megatron",
        "version": MEGATRON_INDICES_VERSION,
        "lengths": hashlib.sha256(lengths.tobytes()).hexdigest(),
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
    }
    arrays = cached_arrays(cache, key, build) if cache else build()
    windows, shuffle = arrays["windows"], arrays["shuffle"]

    def find(numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        return windows.take(shuffle[numbers], axis=0)

    return View(file, 0, len(shuffle), find, arrays["documents"], np.empty(0, np.uint64))


@njit(cache=True, nogil=True)
def _find_windows(
    num_windows: int,
    seq_length: int,
    phase: int,
    key: np.uint64,
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Position of the document and offset where windows of an epoch begin, [n, 2].

    The offset may be in a later document: it counts from the document at the position.

    Args:
        num_windows: number of windows that begin in the epoch.
        seq_length: tokens between the beginnings of two windows.
        phase: position in the epoch at which the first window begins.
        key: permutation key of the windows.
        ends: result of :func:`document_ends`.
        numbers: [n] numbers of windows in shuffled order.
    """
    begins = np.empty((numbers.size, 2), np.int64)
    for sample in range(numbers.size):
        token = phase + permuted(numbers[sample], num_windows, key) * seq_length
        end = np.searchsorted(ends, token, side="right")
        begins[sample, 0] = end * DOCUMENTS_PER_END
        begins[sample, 1] = token - (ends[end - 1] if end > 0 else 0)
    return begins


@njit(cache=True, nogil=True)
def _list_ranges(
    lengths: NDArray[np.integer],
    pointers: NDArray[np.int64],
    token_bytes: int,
    documents: NDArray[np.int32],
    keys: NDArray[np.uint64],
    begins: NDArray[np.integer],
    rows: NDArray[np.int64],
    size: int,
) -> NDArray[np.int64]:
    """List the ranges of samples; ``begins`` is the result of ``find`` of :class:`View`."""
    num_documents = lengths.size
    ranges, used = np.empty((64 + 4 * rows.size, 3), np.int64), 0
    for sample in range(rows.size):
        position, offset, left = np.int64(begins[sample, 0]), np.int64(begins[sample, 1]), size
        while left > 0:
            if documents.size:
                document = np.int64(documents[position])
            elif position < num_documents:
                document = permuted(position, num_documents, keys[0])
            else:  # only the last window of an epoch continues in the next one
                document = permuted(position - num_documents, num_documents, keys[1])
            if offset < lengths[document]:
                if used == len(ranges):
                    ranges = np.concatenate((ranges, ranges))
                length = min(lengths[document] - offset, left)
                ranges[used, 0] = rows[sample]
                ranges[used, 1] = pointers[document] // token_bytes + offset
                ranges[used, 2] = length
                used, left, offset = used + 1, left - length, np.int64(0)
            else:
                offset -= lengths[document]
            position += 1
    return ranges[:used]


@njit(cache=True, nogil=True)
def document_ends(lengths: NDArray[np.int32], key: np.uint64) -> NDArray[np.int64]:
    """Cumulative tokens after every ``DOCUMENTS_PER_END`` documents in shuffled order.

    Args:
        lengths: [num_documents] length of each document.
        key: key of the permutation of the documents.

    Returns:
        [ceil(num_documents / DOCUMENTS_PER_END)] int64; the last entry is the sum of all lengths.
    """
    ends = np.empty(-(-lengths.size // DOCUMENTS_PER_END), np.int64)
    total = np.int64(0)
    for position in range(lengths.size):
        total += lengths[permuted(position, lengths.size, key)]
        ends[position // DOCUMENTS_PER_END] = total
    return ends


def read_ranges(file: TokenFile, ranges: NDArray[np.int64], windows: NDArray[np.int64]) -> None:
    """Copy ranges of tokens to rows of ``windows``, after verifying the blocks that hold them.

    Args:
        file: token file.
        ranges: [r, 3] result of :meth:`View.ranges`.
        windows: [b, s + 1] int64, written.

    Raises:
        UserError: if the tokens are damaged or outside the vocabulary.
    """
    tokens = file.tokens
    if not _copy(tokens.unchecked, tokens.checked, ranges, windows):
        size = tokens.dtype.itemsize
        first = ranges[:, 1] * size // BLOCK_BYTES
        counts = -(-(ranges[:, 1] + ranges[:, 2]) * size // BLOCK_BYTES) - first
        tokens.check(np.repeat(first, counts) + numbers_within(counts))
        _copy(tokens.unchecked, tokens.checked, ranges, windows)


@njit(cache=True, nogil=True)
def _copy(
    tokens: NDArray[np.integer],
    checked: NDArray[np.uint8],
    ranges: NDArray[np.int64],
    windows: NDArray[np.int64],
) -> bool:
    """Copy each range to its row, after the row's previous range, up to an unchecked block.

    Returns:
        Whether all ranges were copied.
    """
    row, filled = np.int64(-1), 0
    for number in range(len(ranges)):
        if ranges[number, 0] != row:
            row, filled = ranges[number, 0], 0
        start, length = ranges[number, 1], ranges[number, 2]
        first = start * tokens.itemsize // BLOCK_BYTES
        last = ((start + length) * tokens.itemsize - 1) // BLOCK_BYTES
        for block in range(first, last + 1):
            if checked[block] == 0:
                return False
        part, target = tokens[start : start + length], windows[row, filled : filled + length]
        for i in range(length):
            target[i] = part[i]
        filled += length
    return True


def megatron_indices(
    num_tokens: int, lengths: NDArray[np.int32], num_samples: int, seq_length: int, seed: int
) -> Arrays:
    """Build Megatron's document, sample and shuffle index of a domain.

    Args:
        num_tokens: number of tokens in the domain.
        lengths: [num_sequences] int32, length of each sequence in tokens.
        num_samples: number of samples needed.
        seq_length: tokens of a sample.
        seed: seed of numpy's RandomState.

    Returns:
        documents [epochs * sequences] int32; windows [samples + 1, 2] int32 or int64; shuffle
        [samples] uint32 or int64.
    """
    num_epochs = max(1, math.ceil((num_samples * seq_length + 1) / num_tokens))
    samples_before_final = ((num_epochs - 1) * num_tokens - 1) // seq_length
    samples_per_epoch = (num_tokens - 1) // seq_length
    separate_final = num_epochs > 1 and num_samples - samples_before_final < int(
        SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch
    )
    # As in Megatron, one random state shuffles the documents first, and then the samples.
    random_state = np.random.RandomState(seed)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), num_epochs)
    _shuffle_parts(documents, len(lengths) * (num_epochs - separate_final), random_state)
    windows = helpers.build_sample_idx(
        lengths, documents, seq_length, num_epochs, num_tokens, True, True
    )
    total = len(windows) - 1
    shuffled = np.arange(total, dtype=np.int64 if total >= WIDE_SHUFFLE_FROM else np.uint32)
    _shuffle_parts(shuffled, samples_before_final if separate_final else total, random_state)
    return {"documents": documents, "windows": windows, "shuffle": shuffled}


def _shuffle_parts(
    array: NDArray[Any], first_part: int, random_state: np.random.RandomState
) -> None:
    random_state.shuffle(array[:first_part])
    if first_part < len(array):
        random_state.shuffle(array[first_part:])


def cached_arrays(folder: Path, key: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Map the arrays of ``key`` from ``folder``; if they are missing, build and store them.

    An entry is one file: the arrays, their layout as JSON, the length of the layout, and the
    SHA-256 of all of these. Entries are written atomically, so that processes can share the folder,
    and verified when read; a damaged entry is rebuilt with a warning. Entries are memory-mapped, so
    that the ranks of a machine share one copy.

    Args:
        folder: folder of the cache.
        key: JSON values that determine the arrays.
        build: function that returns the arrays by name.

    Raises:
        UserError: if the folder cannot be written, or the new entry cannot be read back.
    """
    entry = folder / f"{sha256_of_json(key)}.arrays"
    try:
        return _read(entry)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as problem:
        warnings.warn(f"{entry} is damaged ({problem}) and is rebuilt", stacklevel=2)
    blocks: list[Any] = []
    layout: dict[str, Any] = {}
    offset = 0
    for name, array in build().items():
        layout[name] = (array.dtype.str, array.shape, offset)
        blocks += [array.reshape(-1).view(np.uint8), bytes(-array.nbytes % 64)]
        offset += array.nbytes + len(blocks[-1])
    text = json.dumps(layout).encode()
    digest = hashlib.sha256()
    try:
        with replacing(entry) as temporary, temporary.open("wb") as stream:
            for block in (*blocks, text, len(text).to_bytes(8)):
                stream.write(block)
                digest.update(block)
            stream.write(digest.digest())
        return _read(entry)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write {entry}, or read it back: {error}; free space, or choose another folder"
        ) from error


def _read(entry: Path) -> Arrays:
    content = map_file(entry)
    if hashlib.sha256(content[:-32].data).digest() != content[-32:].tobytes():
        raise ValueError("its checksum differs")
    length = int.from_bytes(content[-40:-32].tobytes())
    layout = json.loads(content[-40 - length : -40].tobytes())
    return {
        name: np.frombuffer(content, dtype, math.prod(shape), offset).reshape(shape)
        for name, (dtype, shape, offset) in layout.items()
    }
