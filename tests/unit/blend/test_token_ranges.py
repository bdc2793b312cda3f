"""Compare ranges and windows of compiled loops with plain slices."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.blend.streams import View, epoch_view, read_ranges
from megatron_chameleon.corpus.domains import DomainTokens
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.corpus.permutation import permutation_key, permuted
from megatron_chameleon.errors import UserError

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


def indexed_view(lengths, dtype, seq_length, first, seed):
    """Return a view of random Megatron indices, and its windows by plain slices, [n, s + 1]."""
    rng = np.random.default_rng(seed)
    file = token_file(lengths, dtype, rng)
    documents = rng.permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(file.lengths[documents])
    begins = rng.permutation(np.arange(0, ends[-1] - seq_length, seq_length))
    positions = np.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - file.lengths[documents])[positions]
    places = np.stack([positions, offsets], axis=1)
    view = View(file, first, len(begins), places.__getitem__, documents, np.empty(0, np.uint64))
    stream = np.concatenate([file.get(i).astype(np.int64) for i in documents])
    return view, np.stack([stream[begin : begin + seq_length + 1] for begin in begins])


def view_of_an_epoch(lengths, dtype, seq_length, kind, epoch, seed):
    """A view of an epoch of all sequences except for the first and the last; and its windows."""
    file = token_file([3, *lengths, 2], dtype, np.random.default_rng(seed)).part(
        1, 1 + len(lengths)
    )
    size, uncut = sum(lengths), sum(lengths) + 1 if kind == "cut" else None
    domain = DomainTokens(
        "a", Path("a"), 1, 1 + len(lengths), size, "a", VOCAB_SIZE, uncut_tokens=uncut
    )

    def shuffled(count, epoch, purpose):
        key = np.uint64(permutation_key(seed, domain.order_number, epoch, purpose))
        return [permuted(number, count, key) for number in range(count)]

    stream = []
    for each in range(epoch + 2):
        order = range(len(lengths))
        if kind != "file order":
            order = shuffled(len(lengths), each if kind == "shuffled" else 0, 0)
        stream += [token for document in order for token in file.get(document).tolist()]
    samples = [j for j in range(len(stream)) if epoch * size <= j * seq_length < (epoch + 1) * size]
    begins = [seq_length * samples[i] for i in shuffled(len(samples), epoch, 1)]
    view = epoch_view(domain, file, samples[-1], seq_length, seed, kind == "shuffled")
    assert (view.first, view.num_samples) == (samples[0], len(samples))
    return view, np.array([stream[begin : begin + seq_length + 1] for begin in begins])


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=60),
    st.integers(1, 9),
    st.sampled_from([np.uint16, np.int32]),
    st.sampled_from(["indexed", "file order", "shuffled", "cut"]),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_windows_match_plain_slices(lengths, seq_length, dtype, kind, first, seed):
    lengths[-1] += 2 * seq_length + 5  # other documents may be empty, but a window must fit
    if kind == "indexed":
        view, expected = indexed_view(lengths, dtype, seq_length, first, seed)
    else:
        view, expected = view_of_an_epoch(lengths, dtype, seq_length, kind, first, seed)
    rows = np.random.default_rng(seed).permutation(view.num_samples)
    assert view.holds(view.first + np.array([-1, 0, len(rows)])).tolist() == [False, True, False]
    ranges = view.ranges(view.first + rows, rows, seq_length + 1)
    windows = np.zeros((len(rows), seq_length + 1), np.int64)
    read_ranges(view.file, ranges, windows)
    np.testing.assert_array_equal(windows, expected)
    assert [row for row, _ in itertools.groupby(ranges[:, 0])] == rows.tolist()
    tokens = [view.file.tokens[start : start + length] for _, start, length in ranges.tolist()]
    np.testing.assert_array_equal(np.concatenate(tokens), windows[rows].reshape(-1))


def test_only_blocks_that_are_read_are_verified():
    per_block = BLOCK_BYTES // 2
    tokens = np.zeros(200 * per_block, np.uint16)
    tokens[150 * per_block] = VOCAB_SIZE
    file = TokenFile(
        Path("a"), BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE), *[np.zeros(1, int)] * 3
    )
    windows = np.ones((2, 150 * per_block), np.int64)
    read_ranges(file, np.array([[1, 0, per_block], [1, per_block, 149 * per_block]]), windows)
    assert windows.sum(axis=1).tolist() == [150 * per_block, 0]
    assert np.flatnonzero(file.tokens.checked).tolist() == list(range(150))
    with pytest.raises(UserError, match=f"token {VOCAB_SIZE}"):
        read_ranges(file, np.array([[0, 150 * per_block - 1, 2]]), windows)
