from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.embedding.windows import Windows, draw_windows

documents = st.lists(st.integers(0, 200), max_size=30)
lengths = st.integers(1, 64)


def ranges_of(windows):
    """(document, first token, token after the last) of every window."""
    ends = windows.start + windows.length
    return list(zip(windows.document.tolist(), windows.start.tolist(), ends.tolist(), strict=True))


def all_windows(document_lengths, window_length, seed=0, name="a"):
    return draw_windows(np.array(document_lengths), window_length, 10**9, seed, name)


@given(documents, lengths)
def test_asked_for_all_they_cover_every_token_once(document_lengths, window_length):
    covered = [np.zeros(length, dtype=int) for length in document_lengths]
    for document, start, end in ranges_of(all_windows(document_lengths, window_length)):
        assert 0 < end - start <= window_length
        assert start >= 0
        assert end <= document_lengths[document]
        covered[document][start:end] += 1
    assert all((times == 1).all() for times in covered)


@given(documents, lengths, st.integers(1, 300), st.integers(0, 5))
def test_as_many_as_asked_for_are_drawn_of_those_there_are(
    document_lengths, window_length, num_windows, seed
):
    every = ranges_of(all_windows(document_lengths, window_length))
    drawn = ranges_of(
        draw_windows(np.array(document_lengths), window_length, num_windows, seed, "a")
    )
    assert len(drawn) == min(num_windows, len(every))
    assert len(set(drawn)) == len(drawn)  # none twice, so that none overlap
    assert set(drawn) <= set(every)


@given(documents, lengths)
def test_a_documents_windows_are_few_and_nearly_equal(document_lengths, window_length):
    windows = all_windows(document_lengths, window_length)
    for document, length in enumerate(document_lengths):
        parts = windows.length[windows.document == document]
        assert len(parts) == -(-length // window_length)
        if len(parts):
            assert parts.max() - parts.min() <= 1


@given(documents, lengths)
def test_across_documents_they_cover_the_text_as_if_it_were_one(document_lengths, window_length):
    sizes = np.array(document_lengths, dtype=np.int32)
    windows = draw_windows(sizes, window_length, 10**9, 0, "a", cross_documents=True)
    whole = all_windows([sum(document_lengths)], window_length)
    assert sorted(windows.length.tolist()) == sorted(whole.length.tolist())
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else np.zeros(0, int)
    np.testing.assert_array_equal(before[windows.document] + windows.start, whole.start)
    assert (windows.start >= 0).all()
    assert (windows.start < sizes[windows.document]).all()


LENGTHS = np.random.default_rng(0).integers(1, 300, 200).astype(np.int32)


def draw(seed, name, num_windows=50):
    return ranges_of(draw_windows(LENGTHS, 32, num_windows, seed, name))


def test_the_draw_is_a_function_of_seed_and_domain():
    first = draw(3, "a")
    np.random.seed(5)
    assert draw(3, "a") == first
    after = np.random.random()
    np.random.seed(5)
    draw(3, "a")
    assert np.random.random() == after  # nor is the process's random state touched


def test_every_window_is_as_likely_as_any_other():
    every = draw(0, "a", num_windows=10**9)
    place = {window: number for number, window in enumerate(every)}
    counts = np.zeros(len(every))
    num_draws = 2000
    for seed in range(num_draws):
        for window in draw(seed, "a"):
            counts[place[window]] += 1
    share = 50 / len(every)
    error = np.sqrt(num_draws * share * (1 - share))
    z = (counts - num_draws * share) / error
    assert abs(z).max() < 5
    assert 0.8 < z.std() < 1.2


@given(st.lists(st.integers(1, 50), max_size=40))
def test_longest_first_keeps_every_window_and_the_order_of_equals(window_lengths):
    number = np.arange(len(window_lengths))
    windows = Windows(number, 2 * number, np.array(window_lengths, dtype=np.int64))
    ordered = windows.longest_first()
    keys = list(zip(-ordered.length, ordered.document, strict=True))
    assert keys == sorted(keys)
    assert sorted(ranges_of(ordered)) == sorted(ranges_of(windows))
