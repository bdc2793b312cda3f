"""Compare windows read by compiled loops with plain slices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.gather import View, document_ends, read_epoch, read_indexed
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.corpus.permutation import permuted

VOCAB_SIZE = 60_000


def unaligned(array):
    """Copy of an array at an odd address, like the arrays of an .idx file."""
    return np.frombuffer(bytes(1) + array.tobytes(), array.dtype, -1, 1)


def token_file(lengths, dtype, rng):
    lengths = np.array(lengths, np.int32)
    tokens = rng.integers(0, VOCAB_SIZE, lengths.sum()).astype(dtype)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
    boundaries = np.arange(len(lengths) + 1)
    checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
    return TokenFile(Path("a"), checked, unaligned(lengths), unaligned(pointers), boundaries)


def indexed_view(lengths, dtype, index_dtype, seq_length, first, seed):
    """Return a view of random Megatron indices, the order of documents, and where windows begin."""
    rng = np.random.default_rng(seed)
    file = token_file(lengths, dtype, rng)
    documents = rng.permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(file.lengths[documents])
    begins = np.arange(0, ends[-1] - seq_length, seq_length)
    positions = np.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - file.lengths[documents])[positions]
    windows = np.stack([positions, offsets], axis=1).astype(index_dtype)
    shuffle = rng.permutation(len(begins)).astype(
        np.uint32 if index_dtype is np.int32 else np.int64
    )
    view = View(file, first, len(begins), read_indexed, (documents, windows, shuffle))
    return view, documents, begins[shuffle]


def epoch_view(lengths, dtype, seq_length, shuffled, seed, first=5, phase=0):
    """A view of an epoch of all sequences except for the first and the last."""
    rng = np.random.default_rng(seed)
    whole, size = token_file([3, *lengths, 2], dtype, rng), len(lengths)
    file = whole.part(1, 1 + size)
    keys = rng.integers(0, 2**64, 3, np.uint64)
    ends, documents = np.empty(0, np.int64), [*range(size)] * 2
    if shuffled:
        ends = document_ends(file.lengths, keys[1])
        documents = [permuted(i, size, key) for key in keys[1:] for i in range(size)]
    count = max(1, -(-(sum(lengths) - phase) // seq_length))
    order = (count, sum(lengths), phase, keys, ends)
    begins = phase + seq_length * np.array([permuted(i, count, keys[0]) for i in range(count)])
    return View(file, first, count, read_epoch, order), np.array(documents), begins


def expected(view, documents, begins, seq_length):
    """All windows [n, s + 1] of a view, by plain slices."""
    stream = np.concatenate([view.file.get(i).astype(np.int64) for i in documents])
    return np.stack([stream[begin : begin + seq_length + 1] for begin in begins])


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=60),
    st.integers(1, 9),
    st.sampled_from([np.uint16, np.int32]),
    st.sampled_from([np.int32, np.int64, "file order", "shuffled"]),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_windows_match_plain_slices(lengths, seq_length, dtype, kind, first, seed):
    lengths[-1] += 2 * seq_length + 5  # other documents may be empty, but a window must fit
    if isinstance(kind, str):
        view, documents, begins = epoch_view(
            lengths, dtype, seq_length, kind == "shuffled", seed, phase=first
        )
    else:
        view, documents, begins = indexed_view(lengths, dtype, kind, seq_length, first, seed)
    rows = np.random.default_rng(seed).permutation(view.num_samples)
    windows = np.zeros((len(rows), seq_length + 1), np.int64)
    view.read(view.first + rows, rows, windows)
    assert view.holds(view.first + np.array([-1, 0, len(rows)])).tolist() == [False, True, False]
    np.testing.assert_array_equal(windows, expected(view, documents, begins, seq_length))
    counts, ranges = view.ranges(view.first + rows, seq_length + 1)
    assert counts.sum() == len(ranges)
    tokens = [view.file.tokens[start : start + length] for start, length in ranges.tolist()]
    np.testing.assert_array_equal(np.concatenate(tokens), windows[rows].reshape(-1))
