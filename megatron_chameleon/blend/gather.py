"""Read a batch of windows from memory-mapped token files in one compiled call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.corpus.indexed import TokenFile

# Luby and Rackoff 1988: four rounds make a Feistel network of random functions a pseudorandom
# permutation. Our round function is only a hash mix, so 8 rounds are used.
ROUNDS = 8
# The multipliers of the finalizer of MurmurHash3; the golden ratio makes the rounds differ.
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(33)

# Shuffled documents whose end is kept: one in so many. Those between are added up when read.
DOCUMENTS_PER_END = 16

_OUT_OF_RANGE = -1

# A view as the compiled code reads it: numbers, and addresses of arrays (0: no array).
_ROW = np.dtype(
    [
        (name, np.int64)
        for name in (
            "first",  # number of the view's first sample
            "num_samples",
            # The token file.
            "tokens",  # uint16 or int32
            "tokens_bytes",  # of one element, here and below
            "checked",  # 1 for each block of tokens that has been checked, uint8
            "lengths",  # tokens of each sequence, int32
            "pointers",  # first byte of each sequence, int64
            # Order of the windows.
            "shuffle",  # uint32 or int64
            "shuffle_bytes",
            "window_key",  # of their permutation, without an array
            # Where windows begin.
            "windows",  # position and offset of each, int32 or int64
            "windows_bytes",
            "phase",  # without an array: token of the epoch where the first window begins
            "begin",  # first token of the domain
            "num_tokens",  # of the domain
            # Order of the documents.
            "documents",  # int32
            "num_documents",
            "first_document",
            "document_key",  # of their permutation, without an array
            "next_document_key",  # the same for the next epoch
            "ends",  # tokens up to every DOCUMENTS_PER_END-th document, int64; 0 for file order
        )
    ]
)


@dataclasses.dataclass(frozen=True)
class View:
    """Consecutive samples of a domain: by Megatron's three indices, or one epoch in closed form.

    Attributes:
        file: the tokens.
        first: number of the first sample within the domain.
        num_samples: number of samples.
        fields: the other fields of :data:`_ROW` that are not 0, with arrays for addresses.
    """

    file: TokenFile
    first: int
    num_samples: int
    fields: dict[str, int | NDArray[Any]]


class ViewTable:
    """One view per domain, as rows for the compiled loop.

    Attributes:
        first: [num_domains] number of the first sample of each view.
        stop: [num_domains] one more than its last; 0 where there is no view yet.
    """

    def __init__(self, num_domains: int) -> None:
        # Kept, since the rows hold addresses of their arrays.
        self._views: list[View | None] = [None] * num_domains
        self._rows = np.zeros(num_domains, _ROW)
        self.first, self.stop = np.zeros((2, num_domains), np.int64)

    def put(self, domain: int, view: View) -> None:
        """Set the view of ``domain``."""
        row = np.zeros((), _ROW)
        fields = {
            "first": view.first,
            "num_samples": view.num_samples,
            "tokens": view.file.tokens.unchecked,
            "checked": view.file.tokens.checked,
            "lengths": view.file.lengths,
            "pointers": view.file.pointers,
            **view.fields,
        }
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous, name
                row[name] = value.ctypes.data
                if f"{name}_bytes" in (row.dtype.names or ()):
                    row[f"{name}_bytes"] = value.itemsize
            else:
                row[name] = np.uint64(value).astype(np.int64)
        self._views[domain], self._rows[domain] = view, row
        self.first[domain], self.stop[domain] = view.first, view.first + view.num_samples

    def gather(
        self, domains: NDArray[np.int64], numbers: NDArray[np.int64], seq_length: int
    ) -> NDArray[np.int64]:
        """Windows of tokens, each with the token that follows it.

        Args:
            domains: [b] domain of each sample.
            numbers: [b] its number within the domain, from ``first`` to ``stop`` of its view.
            seq_length: tokens of a window (s).

        Returns:
            [b, s + 1] int64.

        Raises:
            UserError: if the tokens are damaged or outside the vocabulary.
        """
        windows = np.empty((len(domains), seq_length + 1), np.int64)
        # Upper bound of unchecked blocks: one per document and token of a window.
        blocks = np.empty(2 * (seq_length + 1), np.int64)
        first = 0
        while first < len(domains):
            sample, unchecked = _gather(self._rows, domains, numbers, first, windows, blocks)
            assert unchecked != _OUT_OF_RANGE, "a sample is outside its view"
            if unchecked:
                view = self._views[domains[sample]]
                assert view is not None
                view.file.tokens.check(blocks[:unchecked])
            first = sample + 1
        return windows


def document_ends(file: TokenFile, first: int, stop: int, key: int) -> NDArray[np.int64]:
    """Tokens up to and with each ``DOCUMENTS_PER_END``-th of the shuffled sequences.

    Args:
        file: of the sequences.
        first: first sequence.
        stop: one after the last.
        key: of their permutation.

    Returns:
        [ceil((stop - first) / DOCUMENTS_PER_END)] int64; the last one is the sum of all.
    """
    ends = np.empty(-(-(stop - first) // DOCUMENTS_PER_END), np.int64)
    _sum_ends(file.lengths.ctypes.data, first, stop - first, np.uint64(key), ends)
    return ends


@njit(cache=True, nogil=True)
def permuted(position: int, size: int, key: np.uint64) -> np.int64:
    """Image of ``position`` under a pseudorandom permutation of 0 to ``size`` - 1.

    The permutation is never stored; each key selects one. A Feistel network permutes a domain of an
    even number of bits, up to four times ``size``; an image that is too large is permuted again
    (cycle walking, Black and Rogaway 2002).
    """
    half = np.uint64(1)
    while np.int64(1) << np.int64(half + half) < size:
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    permuted = np.uint64(position)
    while True:
        left, right = permuted >> half, permuted & mask
        for number in range(ROUNDS):
            mixed = right ^ (key + np.uint64(number + 1) * _GOLDEN_RATIO)
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_1
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_2
            left, right = right, left ^ ((mixed ^ (mixed >> _SHIFT)) & mask)
        permuted = (left << half) | right
        if permuted < np.uint64(size):
            return np.int64(permuted)


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    """An address as the pointer that carray takes."""

    def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), emit


def _loader(kind: Any) -> Any:
    @intrinsic
    def load(_: Any, address: Any) -> Any:
        """Load a number from any address: in an .idx they are not aligned."""

        def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            pointer = context.get_value_type(kind).as_pointer()
            return builder.load(builder.inttoptr(arguments[0], pointer), align=1)

        return kind(address), emit

    return load


_load_uint32, _load_int32, _load_int64 = map(_loader, (types.uint32, types.int32, types.int64))


@njit(cache=True, nogil=True)
def _sum_ends(
    lengths: int, first: int, num_documents: int, key: np.uint64, ends: NDArray[np.int64]
) -> None:
    """Fill ``ends`` of :func:`document_ends` from the lengths at an address."""
    total = np.int64(0)
    for position in range(num_documents):
        document = first + permuted(position, num_documents, key)
        total += _load_int32(lengths + 4 * document)
        ends[position // DOCUMENTS_PER_END] = total


@njit(cache=True, nogil=True, boundscheck=False)
def _gather(
    rows: NDArray[Any],
    domains: NDArray[np.int64],
    numbers: NDArray[np.int64],
    first: int,
    windows: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> tuple[int, int]:
    """Fill ``windows`` from sample ``first`` on, up to the first one with unchecked blocks.

    Returns:
        the last sample that was filled, and the number of its unchecked blocks, which are in
        ``blocks``; or _OUT_OF_RANGE.
    """
    for sample in range(first, domains.size):
        row = rows[domains[sample]]
        number = numbers[sample] - row.first
        if number < 0 or number >= row.num_samples:
            return sample, _OUT_OF_RANGE
        out = windows[sample]
        if row.windows != 0:
            position, offset = _window_start(row, number)
            unchecked = _read_documents(row, position, offset, out, blocks)
        else:
            window = permuted(number, row.num_samples, np.uint64(row.window_key))
            start = row.phase + window * (out.size - 1)
            if row.ends != 0:
                position, offset = _find_document(row, start)
                unchecked = _read_documents(row, position, offset, out, blocks)
            else:
                unchecked = _read_circle(row, start, out, blocks)
        if unchecked != 0:
            return sample, unchecked
    return domains.size - 1, 0


@njit(cache=True, nogil=True, boundscheck=False)
def _window_start(row: Any, number: int) -> tuple[Any, Any]:
    """Position and offset of the view's sample ``number``, by arrays."""
    if row.shuffle_bytes == 4:
        window = np.int64(_load_uint32(row.shuffle + 4 * number))
    else:
        window = _load_int64(row.shuffle + 8 * number)
    start = row.windows + 2 * row.windows_bytes * window
    if row.windows_bytes == 4:
        return np.int64(_load_int32(start)), np.int64(_load_int32(start + 4))
    return _load_int64(start), _load_int64(start + 8)


@njit(cache=True, nogil=True, boundscheck=False)
def _find_document(row: Any, token: int) -> tuple[int, int]:
    """Position and offset of a token of an epoch: a search among the ends, then one by one."""
    low, high = 0, (row.num_documents - 1) // DOCUMENTS_PER_END
    while low < high:
        middle = (low + high) // 2
        if _load_int64(row.ends + 8 * middle) > token:
            high = middle
        else:
            low = middle + 1
    offset = token - (_load_int64(row.ends + 8 * (low - 1)) if low > 0 else 0)
    position = low * DOCUMENTS_PER_END
    length = _length(row, _document(row, position))
    while offset >= length:
        offset -= length
        position += 1
        length = _length(row, _document(row, position))
    return position, offset


@njit(cache=True, nogil=True, boundscheck=False)
def _document(row: Any, position: int) -> Any:
    """The sequence at ``position`` of the order; from ``num_documents`` on, of the next epoch."""
    if row.documents != 0:
        return np.int64(_load_int32(row.documents + 4 * position))
    if position < row.num_documents:
        key = np.uint64(row.document_key)
    else:
        position, key = position - row.num_documents, np.uint64(row.next_document_key)
    return row.first_document + permuted(position, row.num_documents, key)


@njit(cache=True, nogil=True, boundscheck=False)
def _length(row: Any, document: int) -> Any:
    return np.int64(_load_int32(row.lengths + 4 * document))


@njit(cache=True, nogil=True, boundscheck=False)
def _read_documents(
    row: Any, position: int, offset: int, out: NDArray[np.int64], blocks: NDArray[np.int64]
) -> int:
    """One window over sequences in their order; its unchecked blocks, or _OUT_OF_RANGE."""
    stop = row.num_documents if row.documents != 0 else 2 * row.num_documents
    filled, unchecked = 0, 0
    while filled < out.size:
        if position >= stop:
            return _OUT_OF_RANGE
        document = _document(row, position)
        start = _load_int64(row.pointers + 8 * document) // row.tokens_bytes
        count = min(_length(row, document) - offset, out.size - filled)
        unchecked = _copy(row, start + offset, out[filled : filled + count], blocks, unchecked)
        filled += count
        position += 1
        offset = 0
    return unchecked


@njit(cache=True, nogil=True, boundscheck=False)
def _read_circle(row: Any, start: int, out: NDArray[np.int64], blocks: NDArray[np.int64]) -> int:
    """Read one window in file order, wrapping from the domain's end to its beginning."""
    start %= row.num_tokens
    filled, unchecked = 0, 0
    while filled < out.size:
        count = min(row.num_tokens - start, out.size - filled)
        unchecked = _copy(row, row.begin + start, out[filled : filled + count], blocks, unchecked)
        filled += count
        start = 0
    return unchecked


@njit(cache=True, nogil=True, boundscheck=False)
def _copy(
    row: Any, start: int, out: NDArray[np.int64], blocks: NDArray[np.int64], unchecked: int
) -> int:
    """Copy tokens, and append their unchecked blocks to the first ``unchecked`` of ``blocks``."""
    if out.size == 0:
        return unchecked
    first = start * row.tokens_bytes // BLOCK_BYTES
    last = ((start + out.size) * row.tokens_bytes - 1) // BLOCK_BYTES
    checked = carray(_pointer(row.checked), last + 1, np.uint8)
    for block in range(first, last + 1):
        if checked[block] == 0:
            blocks[unchecked] = block
            unchecked += 1
    if row.tokens_bytes == 2:
        narrow = carray(_pointer(row.tokens + 2 * start), out.size, np.uint16)
        for i in range(out.size):
            out[i] = narrow[i]
    else:
        wide = carray(_pointer(row.tokens + 4 * start), out.size, np.int32)
        for i in range(out.size):
            out[i] = wide[i]
    return unchecked
