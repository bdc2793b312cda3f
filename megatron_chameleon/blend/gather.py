"""Reading a whole batch of windows out of memory-mapped token files in one compiled call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.blend.permutation import permute_position, permute_position_reference
from megatron_chameleon.corpus.indexed import TokenFile

# What the columns of a table of views hold. An address of 0 says that there is no such array.
(
    _TOKENS,  # address of the tokens
    _TOKEN_BYTES,  # 2 for uint16, 4 for int32
    _NUM_TOKENS,
    _UNREAD,  # address of what is 1 for each block of the tokens that is yet to be checked, uint8
    _STARTS,  # address of the sequences' first tokens, int64
    _LENGTHS,  # address of the sequences' lengths, int32
    _DOCUMENTS,  # address of the order of the sequences, int32
    _NUM_DOCUMENTS,
    _WINDOWS,  # address of the windows' places in that order: position and offset
    _WINDOW_BYTES,  # 4 for int32, 8 for int64
    _SHUFFLE,  # address of the order of the windows
    _SHUFFLE_BYTES,  # 4 for uint32, 8 for int64
    _FIRST,  # number of the view's first sample
    _NUM_SAMPLES,
    _KEY,  # of the permutation of the windows where there is no array of it
    _BEGIN,  # first token of a range that is read as one stream
    _PHASE,  # where in that range the first window begins
    _NUM_COLUMNS,
) = range(18)

_OUT_OF_RANGE = -1


@dataclasses.dataclass(frozen=True)
class ShuffledDocuments:
    """Samples ``first`` to ``first + num_samples`` of a domain: windows over ordered sequences.

    Attributes:
        file: the tokens.
        starts: [num_sequences] int64, where each sequence of ``file`` begins in its tokens.
        lengths: [num_sequences] int32, their tokens.
        documents: order of the sequences, int32 numbers into ``file``.
        windows: [>= num_samples, 2] int32 or int64: position in ``documents`` and offset in tokens
            at which each window begins.
        shuffle: [num_samples] uint32 or int64, the order of the windows.
        first: number of the first sample within its domain.
    """

    file: TokenFile
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int32]
    windows: NDArray[np.integer]
    shuffle: NDArray[np.integer]
    first: int

    @property
    def num_samples(self) -> int:
        """Samples that the view holds."""
        return len(self.shuffle)

    def row(self) -> NDArray[np.int64]:
        """The view as a row of a table."""
        row = _file_row(self.file, self.first, self.num_samples)
        row[_STARTS] = _address(self.starts, np.int64)
        row[_LENGTHS] = _address(self.lengths, np.int32)
        row[_DOCUMENTS] = _address(self.documents, np.int32)
        row[_NUM_DOCUMENTS] = len(self.documents)
        row[_WINDOWS] = _address(self.windows, np.int32, np.int64)
        row[_WINDOW_BYTES] = self.windows.itemsize
        row[_SHUFFLE] = _address(self.shuffle, np.uint32, np.int64)
        row[_SHUFFLE_BYTES] = self.shuffle.itemsize
        return row


@dataclasses.dataclass(frozen=True)
class ShuffledWindows:
    """Samples of a domain as windows of one run of tokens, in an order that needs no memory.

    Attributes:
        file: the tokens.
        begin: first token of the run, which is read around in a circle.
        num_tokens: length of the run.
        phase: token of the run, from ``begin`` on, at which the first window begins.
        first: number of the first sample within its domain.
        num_samples: windows.
        key: of their permutation.
    """

    file: TokenFile
    begin: int
    num_tokens: int
    phase: int
    first: int
    num_samples: int
    key: int

    def row(self) -> NDArray[np.int64]:
        """The view as a row of a table."""
        assert 0 <= self.begin <= self.begin + self.num_tokens <= self.file.tokens.size
        row = _file_row(self.file, self.first, self.num_samples)
        row[_NUM_TOKENS] = self.num_tokens
        row[_BEGIN] = self.begin
        row[_PHASE] = self.phase
        row[_KEY] = np.uint64(self.key).astype(np.int64)
        return row


View = ShuffledDocuments | ShuffledWindows


class ViewTable:
    """Views by their place in a list, in the form that the compiled loop reads.

    Attributes:
        first: [num_views] number of each view's first sample.
        stop: [num_views] one more than its last.
    """

    def __init__(self, views: Sequence[View]) -> None:
        # Kept, since the rows hold addresses into their arrays.
        self._views: list[View | None] = list(views)
        self._rows = np.array([view.row() for view in views], np.int64).reshape(-1, _NUM_COLUMNS)
        self.first = self._rows[:, _FIRST].copy()
        self.stop = self.first + self._rows[:, _NUM_SAMPLES]

    @classmethod
    def empty(cls, num_views: int) -> ViewTable:
        """Places that hold nothing yet."""
        table = cls([])
        table._views = [None] * num_views
        table._rows = np.zeros((num_views, _NUM_COLUMNS), np.int64)
        table.first, table.stop = np.zeros((2, num_views), np.int64)
        return table

    def put(self, place: int, view: View) -> None:
        """Replace one view."""
        self._views[place] = view
        self._rows[place] = view.row()
        self.first[place], self.stop[place] = view.first, view.first + view.num_samples

    def gather(
        self,
        places: NDArray[np.int64],
        numbers: NDArray[np.int64],
        seq_length: int,
    ) -> NDArray[np.int64]:
        """Windows of tokens, each with the token that follows it.

        Args:
            places: [b] which view each sample is of.
            numbers: [b] its number within its domain.
            seq_length: tokens of a window (s).

        Returns:
            [b, s + 1] int64.

        Raises:
            UserError: if the tokens are damaged or outside of the vocabulary.
        """
        windows = np.empty((len(places), seq_length + 1), np.int64)
        # Every document that a window reads begins a block at most, and so does every token.
        blocks = np.empty(2 * (seq_length + 1), np.int64)
        first = 0
        while first < len(places):
            sample, unread = _gather(self._rows, places, numbers, first, windows, blocks)
            assert unread != _OUT_OF_RANGE, "a sample lies outside its view"
            if unread:
                view = self._views[places[sample]]
                assert view is not None
                view.file.tokens.check(blocks[:unread])
            first = sample + 1
        return windows


def gather_reference(view: View, number: int, seq_length: int) -> NDArray[np.int64]:
    """One window [s + 1] int64, by plain slices; for tests."""
    place = number - view.first
    tokens = view.file.tokens
    if isinstance(view, ShuffledWindows):
        run = tokens[view.begin : view.begin + view.num_tokens].astype(np.int64)
        window = permute_position_reference(place, view.num_samples, view.key)
        start = view.phase + seq_length * window
        return np.array([run[(start + i) % run.size] for i in range(seq_length + 1)])
    position, offset = view.windows[view.shuffle[place]]
    parts = [
        tokens[view.starts[d] : view.starts[d] + view.lengths[d]].astype(np.int64)
        for d in view.documents[position:]
    ]
    return np.concatenate(parts)[offset : offset + seq_length + 1]


def _file_row(file: TokenFile, first: int, num_samples: int) -> NDArray[np.int64]:
    row = np.zeros(_NUM_COLUMNS, np.int64)
    row[_TOKENS] = _address(file.tokens.unchecked, np.uint16, np.int32)
    row[_TOKEN_BYTES] = file.dtype.itemsize
    row[_NUM_TOKENS] = file.tokens.size
    row[_UNREAD] = _address(file.tokens.unread, np.uint8)
    row[_FIRST], row[_NUM_SAMPLES] = first, num_samples
    return row


def _address(array: NDArray[np.generic], *dtypes: type) -> int:
    assert array.dtype in [np.dtype(dtype) for dtype in dtypes], array.dtype
    assert array.flags.c_contiguous
    assert array.flags.aligned
    return int(array.ctypes.data)


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as the pointer that carray takes."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit(cache=True, nogil=True, boundscheck=False)
def _gather(
    table: NDArray[np.int64],
    places: NDArray[np.int64],
    numbers: NDArray[np.int64],
    first: int,
    windows: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> tuple[int, int]:
    """Fill ``windows`` from sample ``first`` on, up to the first one with unread blocks.

    Returns:
        the last sample that was filled, and the number of its unread blocks, which are in
        ``blocks``; or _OUT_OF_RANGE.
    """
    for sample in range(first, places.size):
        row = table[places[sample]]
        number = numbers[sample] - row[_FIRST]
        if number < 0 or number >= row[_NUM_SAMPLES]:
            return sample, _OUT_OF_RANGE
        if row[_DOCUMENTS] != 0:
            unread = _read_documents(row, number, windows[sample], blocks)
        else:
            unread = _read_circle(row, number, windows[sample], blocks)
        if unread != 0:
            return sample, unread
    return places.size - 1, 0


@njit(cache=True, nogil=True, boundscheck=False)
def _read_documents(
    row: NDArray[np.int64], number: int, out: NDArray[np.int64], blocks: NDArray[np.int64]
) -> int:
    """One window over sequences in their order; its unread blocks, or _OUT_OF_RANGE."""
    position, offset = _window_place(row, _shuffled(row, number))
    num_documents = row[_NUM_DOCUMENTS]
    documents = carray(_pointer(row[_DOCUMENTS]), num_documents, np.int32)
    filled, unread = 0, 0
    while filled < out.size:
        if position >= num_documents:
            return _OUT_OF_RANGE
        document = documents[position]
        start = carray(_pointer(row[_STARTS] + 8 * document), 1, np.int64)[0]
        length = carray(_pointer(row[_LENGTHS] + 4 * document), 1, np.int32)[0]
        count = min(length - offset, out.size - filled)
        unread = _copy(row, start + offset, out[filled : filled + count], blocks, unread)
        filled += count
        position += 1
        offset = 0
    return unread


@njit(cache=True, nogil=True, boundscheck=False)
def _shuffled(row: NDArray[np.int64], number: int) -> np.int64:
    """Which window the view's sample ``number`` is."""
    if row[_SHUFFLE_BYTES] == 4:
        return np.int64(carray(_pointer(row[_SHUFFLE]), row[_NUM_SAMPLES], np.uint32)[number])
    return carray(_pointer(row[_SHUFFLE]), row[_NUM_SAMPLES], np.int64)[number]


@njit(cache=True, nogil=True, boundscheck=False)
def _window_place(row: NDArray[np.int64], window: int) -> tuple[np.int64, np.int64]:
    """Where a window begins: position in the order of the sequences, and offset in tokens."""
    if row[_WINDOW_BYTES] == 4:
        narrow = carray(_pointer(row[_WINDOWS] + 8 * window), 2, np.int32)
        return np.int64(narrow[0]), np.int64(narrow[1])
    wide = carray(_pointer(row[_WINDOWS] + 16 * window), 2, np.int64)
    return wide[0], wide[1]


@njit(cache=True, nogil=True, boundscheck=False)
def _read_circle(
    row: NDArray[np.int64], number: int, out: NDArray[np.int64], blocks: NDArray[np.int64]
) -> int:
    """One window of a run of tokens whose end is followed by its beginning; its unread blocks."""
    key = np.uint64(row[_KEY])
    window = permute_position(number, row[_NUM_SAMPLES], key)
    start = (row[_PHASE] + window * (out.size - 1)) % row[_NUM_TOKENS]
    filled, unread = 0, 0
    while filled < out.size:
        count = min(row[_NUM_TOKENS] - start, out.size - filled)
        unread = _copy(row, row[_BEGIN] + start, out[filled : filled + count], blocks, unread)
        filled += count
        start = 0
    return unread


@njit(cache=True, nogil=True, boundscheck=False)
def _copy(
    row: NDArray[np.int64],
    start: int,
    out: NDArray[np.int64],
    blocks: NDArray[np.int64],
    unread: int,
) -> int:
    """Copy tokens, and add their unread blocks to the first ``unread`` of ``blocks``."""
    if out.size == 0:
        return unread
    first = start * row[_TOKEN_BYTES] // BLOCK_BYTES
    last = ((start + out.size) * row[_TOKEN_BYTES] - 1) // BLOCK_BYTES
    is_unread = carray(_pointer(row[_UNREAD]), last + 1, np.uint8)
    for block in range(first, last + 1):
        if is_unread[block] != 0:
            blocks[unread] = block
            unread += 1
    if row[_TOKEN_BYTES] == 2:
        narrow = carray(_pointer(row[_TOKENS] + 2 * start), out.size, np.uint16)
        for i in range(out.size):
            out[i] = narrow[i]
    else:
        wide = carray(_pointer(row[_TOKENS] + 4 * start), out.size, np.int32)
        for i in range(out.size):
            out[i] = wide[i]
    return unread
