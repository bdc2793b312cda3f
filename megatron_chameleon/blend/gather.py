"""Read windows of tokens from memory-mapped token files in compiled loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.permutation import permuted

# document_ends has one entry for this many documents; a search adds up the lengths of the documents
# between two entries.
DOCUMENTS_PER_END = 16


@dataclasses.dataclass(frozen=True)
class View:
    """Consecutive samples of a domain, in the order of Megatron's indices or of an epoch's formula.

    Attributes:
        file: token file of the domain.
        first: number of the first sample within the domain.
        num_samples: number of samples.
        kernel: :func:`read_indexed` or :func:`read_epoch`.
        order: the arguments of the kernel, before ``numbers``, that describe the order.
    """

    file: TokenFile
    first: int
    num_samples: int
    kernel: Callable[..., tuple[int, int]]
    order: tuple[Any, ...]

    def holds(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask [n]: whether each of ``numbers`` [n] is a sample of this view."""
        return (numbers >= self.first) & (numbers < self.first + self.num_samples)

    def read(
        self, numbers: NDArray[np.int64], rows: NDArray[np.int64], windows: NDArray[np.int64]
    ) -> None:
        """Write samples, each with the token after it, to rows of ``windows``.

        Args:
            numbers: [n] numbers of samples of this view, within the domain.
            rows: [n] row of ``windows`` for each sample.
            windows: [b, s + 1] int64, written.

        Raises:
            UserError: if the tokens are damaged or outside the vocabulary.
        """
        file, done = self.file, 0
        arrays = file.tokens.unchecked, file.tokens.checked, file.lengths, file.pointers
        # Space for the unchecked blocks of one window: at most one per document and one per token.
        blocks = np.empty(2 * windows.shape[1], np.int64)
        places = numbers - self.first
        while done < len(rows):
            done, unchecked = self.kernel(*arrays, *self.order, places, rows, done, windows, blocks)
            file.tokens.check(blocks[:unchecked])
            # The last sample was copied before its blocks were fetched.
            done -= bool(unchecked) and file.tokens.is_remote

    def ranges(
        self, numbers: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """List the ranges of tokens that :meth:`read` copies, without reading the tokens.

        Args:
            numbers: [n] numbers of samples of this view, within the domain.
            size: tokens of a window (s + 1).

        Returns:
            counts [n], the number of ranges of each sample, and their concatenated ranges [r, 2]:
            first token in the .bin file, and number of tokens.
        """
        file, done, found = self.file, 0, []
        counts = np.empty(len(numbers), np.int64)
        buffer = np.empty((size + 4 * len(numbers), 2), np.int64)
        while done < len(numbers):
            done, used = _LISTING[self.kernel](
                *(file.lengths, file.pointers, file.dtype.itemsize, *self.order),
                *(numbers - self.first, done, size, counts, buffer),
            )
            found.append(buffer[:used].copy())
        return counts, np.concatenate([np.empty((0, 2), np.int64), *found])


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


# A window of ``size`` tokens consists of ranges of the .bin file. The functions below write them as
# pairs of first token and number of tokens to ``ranges`` [>= size, 2], and return their number.
# Reading copies the tokens of these ranges; tracing only lists them.


@njit(cache=True, nogil=True)
def _document_ranges(
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    documents: NDArray[np.int32],
    keys: NDArray[np.uint64],
    position: int,
    offset: int,
    size: int,
    ranges: NDArray[np.int64],
) -> int:
    """Ranges from a position in the document order on.

    The order is ``documents``; if ``documents`` is empty, the order is computed from ``keys``.
    """
    filled, count, num_documents = 0, 0, lengths.size
    while filled < size:
        if documents.size:
            document = np.int64(documents[position])
        elif position < num_documents:
            document = permuted(position, num_documents, keys[1])
        else:  # only the last window of an epoch continues in the next one
            document = permuted(position - num_documents, num_documents, keys[2])
        if offset < lengths[document]:
            ranges[count, 0] = pointers[document] // token_bytes + offset
            ranges[count, 1] = min(lengths[document] - offset, size - filled)
            filled += ranges[count, 1]
            count += 1
            offset = 0
        else:
            offset -= lengths[document]
        position += 1
    return count


@njit(cache=True, nogil=True)
def _epoch_ranges(
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    num_windows: int,
    num_tokens: int,
    phase: int,
    keys: NDArray[np.uint64],
    ends: NDArray[np.int64],
    number: int,
    size: int,
    ranges: NDArray[np.int64],
) -> int:
    """Ranges of one window of an epoch; see :func:`read_epoch` for the arguments."""
    token = phase + permuted(number, num_windows, keys[0]) * (size - 1)
    if ends.size:
        end = np.searchsorted(ends, token, side="right")
        position = np.int64(end) * DOCUMENTS_PER_END
        offset = np.int64(token - (ends[end - 1] if end > 0 else 0))
        no_index = np.empty(0, np.int32)
        return _document_ranges(
            *(lengths, pointers, token_bytes, no_index, keys, position, offset, size, ranges)
        )
    begin, filled, count = pointers[0] // token_bytes, 0, 0
    token %= num_tokens
    while filled < size:  # continue at the beginning of the domain
        ranges[count, 0] = begin + token
        ranges[count, 1] = min(num_tokens - token, size - filled)
        filled += ranges[count, 1]
        count += 1
        token = 0
    return count


# The kernels that read write the samples rows[done:] up to the first one with unchecked blocks.
# They return the new value of ``done``, and the number of unchecked blocks, which they write to
# ``blocks``.


@njit(cache=True, nogil=True)
def read_indexed(
    tokens: NDArray[np.integer],
    checked: NDArray[np.uint8],
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    documents: NDArray[np.int32],
    windows: NDArray[np.integer],
    shuffle: NDArray[np.integer],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    done: int,
    out: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> tuple[int, int]:
    """Read windows by Megatron's document, sample and shuffle index."""
    keys, size = np.empty(0, np.uint64), out.shape[1]
    ranges = np.empty((size, 2), np.int64)
    for sample in range(done, rows.size):
        window = shuffle[numbers[sample]]
        position, offset = np.int64(windows[window, 0]), np.int64(windows[window, 1])
        count = _document_ranges(
            *(lengths, pointers, tokens.itemsize, documents, keys, position, offset, size, ranges)
        )
        unchecked = _copy(tokens, checked, ranges, count, out[rows[sample]], blocks)
        if unchecked:
            return sample + 1, unchecked
    return rows.size, 0


@njit(cache=True, nogil=True)
def read_epoch(
    tokens: NDArray[np.integer],
    checked: NDArray[np.uint8],
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    num_windows: int,
    num_tokens: int,
    phase: int,
    keys: NDArray[np.uint64],
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    done: int,
    out: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> tuple[int, int]:
    """Read shuffled windows of one epoch of a domain; permutations are computed, not stored.

    Args:
        tokens: tokens of the file.
        checked: 1 for each block of tokens that has been verified, else 0.
        lengths: length of each document of the domain in tokens.
        pointers: first byte of each document.
        num_windows: number of windows that begin in the epoch.
        num_tokens: number of tokens in the domain.
        phase: position in the epoch at which the first window begins.
        keys: [3] permutation keys: windows, documents, documents of the next epoch.
        ends: result of :func:`document_ends`; empty if the documents stay in file order.
        numbers: [n] numbers of the samples within the epoch.
        rows: [n] row of each sample in ``out``.
        done: number of samples that are already read.
        out: [b, s + 1] output.
        blocks: receives the unchecked blocks of the last sample.
    """
    order = (num_windows, num_tokens, phase, keys, ends)
    size = out.shape[1]
    ranges = np.empty((size, 2), np.int64)
    for sample in range(done, rows.size):
        count = _epoch_ranges(
            lengths, pointers, tokens.itemsize, *order, numbers[sample], size, ranges
        )
        unchecked = _copy(tokens, checked, ranges, count, out[rows[sample]], blocks)
        if unchecked:
            return sample + 1, unchecked
    return rows.size, 0


# The kernels that list ranges write those of numbers[done:] to ``ranges`` [m, 2] and their number
# to ``counts`` [n], until less than a window fits into ``ranges``. They return the new value of
# ``done``, and the number of ranges.


@njit(cache=True, nogil=True)
def list_indexed(
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    documents: NDArray[np.int32],
    windows: NDArray[np.integer],
    shuffle: NDArray[np.integer],
    numbers: NDArray[np.int64],
    done: int,
    size: int,
    counts: NDArray[np.int64],
    ranges: NDArray[np.int64],
) -> tuple[int, int]:
    """List the ranges of windows of ``size`` tokens by Megatron's indices."""
    keys, used = np.empty(0, np.uint64), 0
    while done < numbers.size and used + size <= len(ranges):
        window = shuffle[numbers[done]]
        position, offset = np.int64(windows[window, 0]), np.int64(windows[window, 1])
        counts[done] = _document_ranges(
            *(lengths, pointers, token_bytes, documents, keys, position, offset, size),
            ranges[used:],
        )
        used += counts[done]
        done += 1
    return done, used


@njit(cache=True, nogil=True)
def list_epoch(
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    token_bytes: int,
    num_windows: int,
    num_tokens: int,
    phase: int,
    keys: NDArray[np.uint64],
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
    done: int,
    size: int,
    counts: NDArray[np.int64],
    ranges: NDArray[np.int64],
) -> tuple[int, int]:
    """List the ranges of windows of ``size`` tokens of an epoch."""
    order, used = (num_windows, num_tokens, phase, keys, ends), 0
    while done < numbers.size and used + size <= len(ranges):
        counts[done] = _epoch_ranges(
            lengths, pointers, token_bytes, *order, numbers[done], size, ranges[used:]
        )
        used += counts[done]
        done += 1
    return done, used


@njit(cache=True, nogil=True)
def _copy(
    tokens: NDArray[np.integer],
    checked: NDArray[np.uint8],
    ranges: NDArray[np.int64],
    count: int,
    out: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> int:
    """Copy the tokens of the first ``count`` ranges; write their unchecked blocks to ``blocks``.

    Returns the number of unchecked blocks.
    """
    filled, unchecked = 0, 0
    for number in range(count):
        start, length = ranges[number, 0], ranges[number, 1]
        first = start * tokens.itemsize // BLOCK_BYTES
        last = ((start + length) * tokens.itemsize - 1) // BLOCK_BYTES
        for block in range(first, last + 1):
            if checked[block] == 0:
                blocks[unchecked] = block
                unchecked += 1
        part, target = tokens[start : start + length], out[filled : filled + length]
        for i in range(length):
            target[i] = part[i]
        filled += length
    return unchecked


_LISTING = {read_indexed: list_indexed, read_epoch: list_epoch}
