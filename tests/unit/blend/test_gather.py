from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.gather import (
    ShuffledDocuments,
    ShuffledWindows,
    ViewTable,
    gather_reference,
)
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.errors import UserError
from tests.addresses import at_offset

VOCAB_SIZE = 60_000


def token_file(lengths, dtype, rng):
    lengths = np.array(lengths, np.int32)
    tokens = rng.integers(0, VOCAB_SIZE, lengths.sum()).astype(dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1)
    checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
    return TokenFile(Path("a"), checked, lengths, starts * np.dtype(dtype).itemsize, boundaries)


def documents_view(lengths, dtype, index_dtype, seq_length, first, seed):
    """Windows of ``seq_length`` tokens over the documents in some order."""
    rng = np.random.default_rng(seed)
    file = token_file(lengths, dtype, rng)
    documents = rng.permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(file.lengths[documents])
    begins = np.arange(0, ends[-1] - seq_length, seq_length)
    positions = np.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - file.lengths[documents])[positions]
    return ShuffledDocuments(
        file=file,
        starts=file.starts,
        lengths=file.lengths,
        documents=documents,
        windows=np.stack([positions, offsets], axis=1).astype(index_dtype),
        shuffle=rng.permutation(len(begins)).astype(
            np.uint32 if index_dtype is np.int32 else np.int64
        ),
        first=first,
    )


def gathered(views, pairs, seq_length):
    places, numbers = np.array(pairs, np.int64).T.copy()
    return ViewTable(views).gather(places, numbers, seq_length)


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=30),
    st.integers(1, 9),
    st.sampled_from([np.uint16, np.int32]),
    st.sampled_from([np.int32, np.int64]),
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
)
def test_windows_over_documents_are_those_of_plain_slices(
    lengths, seq_length, dtype, index_dtype, first, seed
):
    lengths[0] += 2 * seq_length + 1  # for two windows at least, documents of no tokens or not
    view = documents_view(lengths, dtype, index_dtype, seq_length, first, seed)
    numbers = range(first, first + view.num_samples)
    found = gathered([view], [(0, number) for number in numbers], seq_length)
    expected = [gather_reference(view, number, seq_length) for number in numbers]
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


@given(
    st.integers(6, 80),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([np.uint16, np.int32]),
    st.integers(0, 2**64 - 1),
)
def test_windows_of_a_circle_are_those_of_plain_slices(size, seq_length, phase, dtype, key):
    file = token_file([3, size, 2], dtype, np.random.default_rng(0))
    count = max(1, (size - phase) // seq_length)
    view = ShuffledWindows(
        file, begin=3, num_tokens=size, phase=phase, first=7, num_samples=count, key=key
    )
    numbers = range(7, 7 + count)
    found = gathered([view], [(0, number) for number in numbers], seq_length)
    expected = [gather_reference(view, number, seq_length) for number in numbers]
    np.testing.assert_array_equal(found, expected)
    assert len({tuple(window) for window in found.tolist()}) == count


def test_a_batch_may_come_from_views_of_every_kind():
    rng = np.random.default_rng(1)
    views = [
        documents_view([50, 3, 0, 70], np.uint16, np.int32, 4, 0, seed=1),
        documents_view([9] * 20, np.int32, np.int64, 4, 100, seed=2),
        ShuffledWindows(token_file([90], np.int32, rng), 10, 77, 2, 5, 19, key=3),
    ]
    pairs = [(place, view.first + i) for i in range(15) for place, view in enumerate(views)]
    found = gathered(views, pairs, 4)
    for row, (place, number) in zip(found, pairs, strict=True):
        np.testing.assert_array_equal(row, gather_reference(views[place], number, 4))


@pytest.mark.parametrize("offset", [8, 24])
def test_windows_are_the_same_wherever_the_arrays_lie(offset):
    for dtype, index_dtype in ((np.uint16, np.int32), (np.int32, np.int64)):
        view = documents_view([50, 3, 0, 70], dtype, index_dtype, 4, 0, seed=1)
        tokens = at_offset(view.file.tokens.unchecked, offset)
        checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
        file = dataclasses.replace(view.file, tokens=checked)
        arrays = ("starts", "lengths", "documents", "windows", "shuffle")
        moved = {name: at_offset(getattr(view, name), offset) for name in arrays}
        pairs = [(0, number) for number in range(view.num_samples)]
        found = gathered([dataclasses.replace(view, file=file, **moved)], pairs, 4)
        np.testing.assert_array_equal(found, gathered([view], pairs, 4))


def test_a_view_can_be_put_in_the_place_of_another():
    first, second = (documents_view([90], np.uint16, np.int32, 4, n, seed=n) for n in (0, 10))
    table = ViewTable.empty(2)
    assert (table.first.tolist(), table.stop.tolist()) == ([0, 0], [0, 0])
    for view in (first, second):
        table.put(1, view)
        assert (table.first[1], table.stop[1]) == (view.first, view.first + view.num_samples)
        window = table.gather(np.array([1]), np.array([view.first]), 4)[0]
        np.testing.assert_array_equal(window, gather_reference(view, view.first, 4))


@pytest.mark.parametrize("number", [-1, 3, 8, 2**40])
def test_a_sample_outside_of_its_view_is_an_assertion_and_no_crash(number):
    view = documents_view([21], np.uint16, np.int32, 4, first=3, seed=0)
    assert view.num_samples == 5
    if 3 <= number < 8:
        gathered([view], [(0, number)], 4)
        return
    with pytest.raises(AssertionError, match="outside its view"):
        gathered([view], [(0, number)], 4)


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, VOCAB_SIZE), (np.int32, -5)])
def test_a_token_that_is_none_of_the_vocabulary_is_told_with_its_file(dtype, token):
    view = documents_view([90], dtype, np.int32, 4, 0, seed=0)
    window = view.windows[view.shuffle[3]]
    view.file.tokens.unchecked[int(window[1]) + 2] = token
    with pytest.raises(UserError, match=rf"^a\.bin holds token {token}, .* {VOCAB_SIZE}"):
        gathered([view], [(0, 2), (0, 3)], 4)
