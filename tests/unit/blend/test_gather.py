"""Windows read by the compiled loop against plain slices, and the permutation it computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.gather import ROUNDS, View, ViewTable, document_ends, permuted
from megatron_chameleon.blend.streams import permutation_key
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from tests.addresses import at_offset

VOCAB_SIZE = 60_000


def token_file(lengths, dtype, rng):
    lengths = np.array(lengths, np.int32)
    tokens = rng.integers(0, VOCAB_SIZE, lengths.sum()).astype(dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1)
    checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
    return TokenFile(Path("a"), checked, lengths, starts * np.dtype(dtype).itemsize, boundaries)


def indexed_view(lengths, dtype, index_dtype, seq_length, first, seed):
    """Windows of ``seq_length`` tokens over the documents in some order."""
    rng = np.random.default_rng(seed)
    file = token_file(lengths, dtype, rng)
    documents = rng.permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(file.lengths[documents])
    begins = np.arange(0, ends[-1] - seq_length, seq_length)
    positions = np.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - file.lengths[documents])[positions]
    fields: dict[str, Any] = {
        "documents": documents,
        "num_documents": len(documents),
        "windows": np.stack([positions, offsets], axis=1).astype(index_dtype),
        "shuffle": rng.permutation(len(begins)).astype(
            np.uint32 if index_dtype is np.int32 else np.int64
        ),
    }
    return View(file, first, len(begins), fields)


def epoch_view(lengths, dtype, seq_length, shuffled, seed, first=5, phase=0):
    """An epoch of all sequences but the first and the last."""
    rng = np.random.default_rng(seed)
    file = token_file([3, *lengths, 2], dtype, rng)
    window_key, *keys = (int(key) for key in rng.integers(0, 2**64, 3, np.uint64))
    fields = {"phase": phase, "begin": 3, "num_tokens": sum(lengths), "window_key": window_key}
    fields |= {"first_document": 1, "num_documents": len(lengths)}
    if shuffled:
        fields |= {"document_key": keys[0], "next_document_key": keys[1]}
        fields["ends"] = document_ends(file, 1, 1 + len(lengths), keys[0])
    return View(file, first, max(1, -(-(sum(lengths) - phase) // seq_length)), fields)


def reference(view, number, seq_length):
    """One window [s + 1], by plain slices."""
    place, file, row = number - view.first, view.file, view.fields
    documents = np.split(file.tokens[:].astype(np.int64), np.cumsum(file.lengths)[:-1])
    if "windows" in row:
        position, start = row["windows"][row["shuffle"][place]]
        order = row["documents"][position:].tolist()
    else:
        window = permuted(place, view.num_samples, np.uint64(row["window_key"]))
        start, size = row["phase"] + seq_length * window, row["num_documents"]
        order = [
            row["first_document"] + (permuted(i, size, np.uint64(row[key])) if key in row else i)
            for key in ("document_key", "next_document_key")
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
    st.lists(st.integers(0, 12), min_size=2, max_size=60),
    st.integers(1, 9),
    st.sampled_from([np.uint16, np.int32]),
    st.sampled_from([np.int32, np.int64, "file order", "shuffled"]),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_windows_match_the_reference(lengths, seq_length, dtype, kind, first, seed):
    lengths[-1] += 2 * seq_length + 5  # for two windows at least; documents may have no tokens
    if isinstance(kind, str):
        view = epoch_view(lengths, dtype, seq_length, kind == "shuffled", seed, phase=first)
    else:
        view = indexed_view(lengths, dtype, kind, seq_length, first, seed)
    numbers = range(view.first, view.first + view.num_samples)
    found = gathered([view], [(0, number) for number in numbers], seq_length)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, [reference(view, n, seq_length) for n in numbers])


def moved(view, offset):
    """Copy of a view with its arrays ``offset`` bytes past a cache line."""
    tokens = at_offset(view.file.tokens.unchecked, offset)
    # In an .idx, lengths and pointers are not even aligned.
    index = {
        name: np.frombuffer(bytes(2) + getattr(view.file, name).tobytes(), dtype, -1, 2)
        for name, dtype in (("lengths", np.int32), ("pointers", np.int64))
    }
    checked = BlockTokens(Path("a.bin"), tokens, None, VOCAB_SIZE)
    fields = {
        name: at_offset(value, offset) if isinstance(value, np.ndarray) else value
        for name, value in view.fields.items()
    }
    file = dataclasses.replace(view.file, tokens=checked, **index)
    return dataclasses.replace(view, file=file, fields=fields)


@pytest.mark.parametrize("offset", [8, 24])
def test_a_batch_from_views_of_every_kind_at_any_address(offset):
    views = [
        indexed_view([50, 3, 0, 70], np.uint16, np.int32, 4, 0, seed=1),
        indexed_view([9] * 20, np.int32, np.int64, 4, 100, seed=2),
        epoch_view([60, 17], np.int32, 4, False, seed=3),
        epoch_view([40, 0, 37], np.uint16, 4, True, seed=4),
    ]
    pairs = [(place, view.first + i) for i in range(15) for place, view in enumerate(views)]
    expected = [reference(views[place], number, 4) for place, number in pairs]
    np.testing.assert_array_equal(gathered(views, pairs, 4), expected)
    moved_views = [moved(view, offset) for view in views]
    np.testing.assert_array_equal(gathered(moved_views, pairs, 4), expected)
    with pytest.raises(AssertionError, match="outside its view"):
        gathered(views, [(1, 99)], 4)


WORD = 2**64 - 1
KEYS = st.integers(0, 2**64 - 1)


def permute_positions(positions, size, key):
    return np.array([permuted(i, size, np.uint64(key)) for i in np.asarray(positions).tolist()])


def permuted_reference(position, size, key):
    """:func:`permuted` in plain Python."""
    half = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = position >> half, position % 2**half
        for number in range(ROUNDS):
            mixed = right ^ (key + (number + 1) * 0x9E3779B97F4A7C15 & WORD)
            mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & WORD
            mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & WORD
            left, right = right, left ^ (mixed ^ mixed >> 33) % 2**half
        position = left << half | right
        if position < size:
            return position


@given(st.integers(1, 3000), KEYS)
def test_permuted_is_a_permutation(size, key):
    found = permute_positions(np.arange(size), size, key)
    np.testing.assert_array_equal(np.sort(found), np.arange(size))


@given(st.integers(1, 2**62), KEYS, st.data())
def test_permuted_matches_the_reference(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    found = permute_positions(np.array(positions), size, key)
    assert found.tolist() == [permuted_reference(p, size, key) for p in positions]


@pytest.mark.parametrize("size", [3, 4, 5, 17, 4096, 100_003])
def test_permuted_positions_are_uniform(size):
    # Where the first, the last and a middle position go, over many keys: a chi-square test, which
    # a good permutation fails once in 10^6 times (here never: the keys are fixed).
    keys = [permutation_key(number, size) for number in range(4000)]
    bins = min(size, 16)
    for position in (0, size // 2, size - 1):
        places = np.array([permuted(position, size, np.uint64(key)) for key in keys])
        counts = np.bincount(places * bins // size, minlength=bins)
        edges = -(-np.arange(bins + 1) * size // bins)
        expected = len(keys) * np.diff(edges) / size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < bins - 1 + 6 * np.sqrt(2 * (bins - 1)), position


@pytest.mark.parametrize("size", [1000, 4097, 65536])
def test_permuted_neighbours_are_uncorrelated(size):
    found = permute_positions(np.arange(size), size, permutation_key(1, size)).astype(float)
    for lag in (1, 2, 16):
        correlation = np.corrcoef(found[:-lag], found[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(size), lag


def test_permutations_are_the_same_in_every_release():
    # A run resumed with another release continues with the same samples.
    key = permutation_key(1234, 5, 0, 1)
    assert key == 4366374342567971827
    assert permute_positions(np.arange(8), 8, key).tolist() == [4, 2, 3, 7, 5, 1, 6, 0]
