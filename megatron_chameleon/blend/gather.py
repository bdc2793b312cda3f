"""Reading a whole batch of windows out of memory-mapped token files in one compiled call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatron_chameleon.blend.permutation import permute_position, permute_position_reference
from megatron_chameleon.corpus.indexed_reader import TokenFile
from megatron_chameleon.errors import UserError

# What the columns of a table of views hold. An address of 0 says that there is no such array.
(
    _TOKENS,  # address of the tokens
    _TOKEN_BYTES,  # 2 for uint16, 4 for int32
    _NUM_TOKENS,
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
) = range(17)

_OUT_OF_RANGE = -2
_ALL_WELL = -1


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
        vocab_size: int,
    ) -> NDArray[np.int64]:
        """Windows of tokens, each with the token that follows it.

        Args:
            places: [b] which view each sample is of.
            numbers: [b] its number within its domain.
            seq_length: tokens of a window (s).
            vocab_size: one more than the largest token that may occur.

        Returns:
            [b, s + 1] int64.

        Raises:
            UserError: naming the file in which a token is none of the vocabulary.
        """
        windows = np.empty((len(places), seq_length + 1), np.int64)
        bad = _gather(self._rows, places, numbers, vocab_size, windows)
        assert bad != _OUT_OF_RANGE, "a sample lies outside its view"
        if bad != _ALL_WELL:
            view = self._views[places[bad]]
            assert view is not None
            unknown = windows[bad][(windows[bad] < 0) | (windows[bad] >= vocab_size)]
            raise UserError(
                f"{view.file.prefix}.bin holds token {unknown[0]}, which a vocabulary of "
                f"{vocab_size} does not have: it is damaged or of another tokenizer; restore it "
                "or preprocess again"
            )
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
    row[_TOKENS] = _address(file.tokens, np.uint16, np.int32)
    row[_TOKEN_BYTES] = file.tokens.itemsize
    row[_NUM_TOKENS] = file.tokens.size
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
    vocab_size: int,
    windows: NDArray[np.int64],
) -> int:
    """Fill ``windows``; -1, or the first sample with a token out of the vocabulary."""
    for sample in range(places.size):
        row = table[places[sample]]
        number = numbers[sample] - row[_FIRST]
        if number < 0 or number >= row[_NUM_SAMPLES]:
            return _OUT_OF_RANGE
        if row[_DOCUMENTS] != 0:
            complete = _read_documents(row, number, windows[sample])
        else:
            complete = _read_circle(row, number, windows[sample])
        if not complete:
            return _OUT_OF_RANGE
        smallest, largest = windows[sample, 0], windows[sample, 0]
        for token in windows[sample]:
            smallest, largest = min(smallest, token), max(largest, token)
        if smallest < 0 or largest >= vocab_size:
            return sample
    return _ALL_WELL


@njit(cache=True, nogil=True, boundscheck=False)
def _read_documents(row: NDArray[np.int64], number: int, out: NDArray[np.int64]) -> bool:
    """One window over sequences in their order; whether there were enough of them."""
    position, offset = _window_place(row, _shuffled(row, number))
    num_documents = row[_NUM_DOCUMENTS]
    documents = carray(_pointer(row[_DOCUMENTS]), num_documents, np.int32)
    filled = 0
    while filled < out.size:
        if position >= num_documents:
            return False
        document = documents[position]
        start = carray(_pointer(row[_STARTS] + 8 * document), 1, np.int64)[0]
        length = carray(_pointer(row[_LENGTHS] + 4 * document), 1, np.int32)[0]
        count = min(length - offset, out.size - filled)
        _copy(row, start + offset, out[filled : filled + count])
        filled += count
        position += 1
        offset = 0
    return True


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
def _read_circle(row: NDArray[np.int64], number: int, out: NDArray[np.int64]) -> bool:
    """One window of a run of tokens whose end is followed by its beginning."""
    key = np.uint64(row[_KEY])
    window = permute_position(number, row[_NUM_SAMPLES], key)
    start = (row[_PHASE] + window * (out.size - 1)) % row[_NUM_TOKENS]
    filled = 0
    while filled < out.size:
        count = min(row[_NUM_TOKENS] - start, out.size - filled)
        _copy(row, row[_BEGIN] + start, out[filled : filled + count])
        filled += count
        start = 0
    return True


@njit(cache=True, nogil=True, boundscheck=False)
def _copy(row: NDArray[np.int64], start: int, out: NDArray[np.int64]) -> None:
    if row[_TOKEN_BYTES] == 2:
        narrow = carray(_pointer(row[_TOKENS] + 2 * start), out.size, np.uint16)
        for i in range(out.size):
            out[i] = narrow[i]
    else:
        wide = carray(_pointer(row[_TOKENS] + 4 * start), out.size, np.int32)
        for i in range(out.size):
            out[i] = wide[i]
