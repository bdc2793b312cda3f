from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.gather import (
    EpochView,
    IndexedView,
    ViewTable,
    document_ends,
    permuted,
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
    return IndexedView(
        file=file,
        documents=documents,
        windows=np.stack([positions, offsets], axis=1).astype(index_dtype),
        shuffle=rng.permutation(len(begins)).astype(
            np.uint32 if index_dtype is np.int32 else np.int64
        ),
        first=first,
    )


def epoch_view(lengths, dtype, seq_length, shuffled, seed, first=5, phase=0):
    """An epoch of all sequences but the first and the last."""
    rng = np.random.default_rng(seed)
    file = token_file([3, *lengths, 2], dtype, rng)
    window_key, *keys = (int(key) for key in rng.integers(0, 2**64, 3, np.uint64))
    ends = document_ends(file, 1, 1 + len(lengths), keys[0]) if shuffled else None
    return EpochView(
        file=file,
        first=first,
        num_samples=max(1, -(-(sum(lengths) - phase) // seq_length)),
        phase=phase,
        begin=3,
        num_tokens=sum(lengths),
        window_key=window_key,
        first_document=1,
        num_documents=len(lengths),
        document_keys=(keys[0], keys[1]) if shuffled else None,
        ends=ends,
    )


def reference(view, number, seq_length):
    """One window [s + 1], by plain slices."""
    place, file = number - view.first, view.file
    documents = np.split(file.tokens[:].astype(np.int64), np.cumsum(file.lengths)[:-1])
    if isinstance(view, IndexedView):
        position, start = view.windows[view.shuffle[place]]
        order = view.documents[position:].tolist()
    else:
        window = permuted(place, view.num_samples, np.uint64(view.window_key))
        start, size = view.phase + seq_length * window, view.num_documents
        order = [
            view.first_document + (permuted(i, size, np.uint64(key)) if view.document_keys else i)
            for key in view.document_keys or (0, 0)
            for i in range(size)
        ]
    return np.concatenate([documents[i] for i in order])[start : start + seq_length + 1]


def gathered(views, pairs, seq_length):
    table = ViewTable(len(views))
    for domain, view in enumerate(views):
        table.put(domain, view)
    domains, numbers = np.array(pairs, np.int64).T.copy()
    return table.gather(domains, numbers, seq_length)


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
    expected = [reference(view, number, seq_length) for number in numbers]
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([np.uint16, np.int32]),
    st.integers(0, 2**32 - 1),
)
def test_windows_of_an_epoch_are_those_of_plain_slices(
    lengths, seq_length, phase, shuffled, dtype, seed
):
    lengths[-1] += seq_length + 5
    view = epoch_view(lengths, dtype, seq_length, shuffled, seed, phase=phase)
    numbers = range(view.first, view.first + view.num_samples)
    found = gathered([view], [(0, number) for number in numbers], seq_length)
    np.testing.assert_array_equal(found, [reference(view, n, seq_length) for n in numbers])


def test_a_batch_may_come_from_views_of_every_kind():
    views = [
        documents_view([50, 3, 0, 70], np.uint16, np.int32, 4, 0, seed=1),
        documents_view([9] * 20, np.int32, np.int64, 4, 100, seed=2),
        epoch_view([60, 17], np.int32, 4, False, seed=3),
        epoch_view([40, 0, 37], np.uint16, 4, True, seed=4),
    ]
    pairs = [(place, view.first + i) for i in range(15) for place, view in enumerate(views)]
    found = gathered(views, pairs, 4)
    for row, (place, number) in zip(found, pairs, strict=True):
        np.testing.assert_array_equal(row, reference(views[place], number, 4))


@pytest.mark.parametrize("offset", [2, 8, 24])
def test_windows_are_the_same_wherever_the_arrays_lie(offset):
    for dtype, index_dtype in ((np.uint16, np.int32), (np.int32, np.int64)):
        view = documents_view([50, 3, 0, 70], dtype, index_dtype, 4, 0, seed=1)
        tokens = at_offset(view.file.tokens.unchecked, max(offset, 8))
        # In an .idx, lengths and pointers are not even aligned.
        index = {
            name: np.frombuffer(
                bytes(offset) + getattr(view.file, name).tobytes(), dtype, -1, offset
            )
            for name, dtype in (("lengths", np.int32), ("pointers", np.int64))
        }
        checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
        file = dataclasses.replace(view.file, tokens=checked, **index)
        arrays = ("documents", "windows", "shuffle")
        moved = {name: at_offset(getattr(view, name), max(offset, 8)) for name in arrays}
        pairs = [(0, number) for number in range(view.num_samples)]
        found = gathered([dataclasses.replace(view, file=file, **moved)], pairs, 4)
        np.testing.assert_array_equal(found, gathered([view], pairs, 4))


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
