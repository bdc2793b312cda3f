"""Sampled windows: coverage, uniformity, and reading them into memory."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import load_windows, open_data_path, open_domains
from megatron_chameleon.corpus.windows import (
    draw_windows,
    split_at_documents,
    split_at_edges,
    spread_windows,
)
from megatron_chameleon.errors import UserError

documents = st.lists(st.integers(0, 200), max_size=30)
lengths = st.integers(1, 64)


def ranges_of(windows):
    """(document, first token, token after the last) of every window."""
    ends = windows.start + windows.length
    return list(zip(windows.document.tolist(), windows.start.tolist(), ends.tolist(), strict=True))


def all_windows(document_lengths, window_length, seed=0, name="a", **options):
    return draw_windows(np.array(document_lengths), window_length, 10**9, seed, name, **options)


@given(documents, lengths)
def test_windows_within_documents_cover_every_token_once(document_lengths, window_length):
    windows = all_windows(document_lengths, window_length, within_documents=True)
    covered = [np.zeros(length, dtype=int) for length in document_lengths]
    for document, start, end in ranges_of(windows):
        assert 0 <= start < end <= min(start + window_length, document_lengths[document])
        covered[document][start:end] += 1
    assert all((times == 1).all() for times in covered)
    for document, length in enumerate(document_lengths):
        parts = windows.length[windows.document == document]
        assert len(parts) == -(-length // window_length)
        assert not len(parts) or parts.max() - parts.min() <= 1


@given(documents, lengths)
def test_windows_of_one_length_are_consecutive_in_the_concatenated_text(
    document_lengths, window_length
):
    windows = all_windows(document_lengths, window_length)
    text = [(d, t) for d, tokens in enumerate(document_lengths) for t in range(tokens)]
    length = min(window_length, len(text))
    assert windows.length.tolist() == [length] * (len(text) // length if length else 0)
    firsts = zip(windows.document.tolist(), windows.start.tolist(), strict=True)
    assert list(firsts) == text[: length * len(windows) : length or 1]
    parts = split_at_documents(windows, np.array(document_lengths, dtype=np.int32))
    tokens = [(d, t) for d, start, end in ranges_of(parts) for t in range(start, end)]
    assert tokens == text[: length * len(windows)]
    assert (parts.length > 0).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
def test_ranges_are_split_at_the_edges_of_documents(lengths, data):
    edges = np.cumsum([0, *lengths])
    starts, sizes = [], []
    for _ in range(data.draw(st.integers(0, 5)) if edges[-1] else 0):
        starts.append(data.draw(st.integers(0, int(edges[-1]) - 1)))
        sizes.append(data.draw(st.integers(1, int(edges[-1]) - starts[-1])))
    index, parts = split_at_edges(edges, np.array(starts, np.int64), np.array(sizes, np.int64))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    tokens = [
        (number, owner[token], token - edges[owner[token]])
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for token in range(start, start + size)
    ]
    assert tokens == [
        (number, document, token)
        for number, (document, first, end) in zip(index, ranges_of(parts), strict=True)
        for token in range(first, end)
    ]
    assert len(parts) == len({token[:2] for token in tokens})


def test_the_length_of_documents_does_not_change_the_positions_of_windows():
    """A domain of short documents and one of long documents have windows of the same length."""
    short, long = (draw_windows(np.full(n, 4096 // n), 64, 30, 0, "a") for n in (256, 2))
    np.testing.assert_array_equal(short.length, long.length)
    within = draw_windows(np.full(256, 16), 64, 30, 0, "a", within_documents=True)
    assert within.length.max() == 16


LENGTHS = np.random.default_rng(0).integers(1, 300, 200).astype(np.int32)


def draw(seed, num_windows=50):
    return ranges_of(draw_windows(LENGTHS, 32, num_windows, seed, "a"))


def test_sample_is_uniform_and_a_function_of_the_seed():
    np.random.seed(5)
    first, after = draw(3), np.random.random()
    np.random.seed(6)
    assert draw(3) == first
    np.random.seed(5)
    assert np.random.random() == after  # the global random state is not used
    every = draw(0, num_windows=10**9)
    assert len(first) == len(set(first)) == 50
    place = {window: number for number, window in enumerate(every)}
    counts = np.zeros(len(every))
    num_draws = 2000
    for seed in range(num_draws):
        for window in draw(seed):
            counts[place[window]] += 1
    share = 50 / len(every)
    z = (counts - num_draws * share) / np.sqrt(num_draws * share * (1 - share))
    assert abs(z).max() < 5
    assert 0.8 < z.std() < 1.2


def texts_of(file, windows):
    places = zip(windows.document, windows.start, windows.length, strict=True)
    return [file.get(int(d), int(start), int(n)).tolist() for d, start, n in places]


def test_loaded_windows_equal_sampled_ones(corpus):
    path = DataPath.parse(f"1.0 {corpus.prefix('code', 'train')}")
    valid = open_data_path(path, "50,25,25", corpus.tokenizer).of("valid").domains
    for domain in (*open_domains(corpus).domains, *valid):
        tokens, windows = load_windows(domain, 32, 20, seed=7)
        file = domain.open()
        expected = draw_windows(file.lengths, 32, 20, 7, domain.order_key)
        assert windows.length.tolist() == [32] * 20
        parts = split_at_documents(expected, file.lengths)
        found, text = texts_of(tokens, windows), texts_of(file, parts)
        assert [*chain.from_iterable(found)] == [*chain.from_iterable(text)]
        assert tokens.tokens.size == expected.length.sum()
        starts = np.cumsum(expected.length) - expected.length
        np.testing.assert_array_equal(tokens.starts, starts)
    assert domain.first > 0
    with pytest.raises(UserError, match="token"):
        load_windows(dataclasses.replace(domain, vocab_size=100), 32, 10_000, seed=0)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=20),
    st.integers(1, 70),
    st.integers(1, 6),
)
def test_windows_of_a_document_are_disjoint_and_cover_short_ones(lengths, window_length, most):
    windows = spread_windows(np.array(lengths), window_length, most)
    assert windows.length.min() >= 1
    assert windows.length.max() <= window_length
    for document, length in enumerate(lengths):
        here = windows.document == document
        start, end = windows.start[here], (windows.start + windows.length)[here]
        assert here.sum() == min(most, -(-length // window_length))
        assert start[0] >= 0
        assert end[-1] <= length
        assert (start[1:] >= end[:-1]).all()
        if here.sum() < most:
            assert windows.length[here].sum() == length
