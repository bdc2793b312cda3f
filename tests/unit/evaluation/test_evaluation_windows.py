"""Stretches of text are cut so that every token is scored once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.evaluation.windows import Windows, cut, spread_evenly

SIZES = st.lists(st.integers(0, 50), max_size=10)
WINDOWS = st.integers(1, 20).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(0, length - 1))
)


def cut_sizes(sizes: list[int], window_length: int, overlap: int) -> tuple[Windows, list[int]]:
    """Stretches of these sizes with a token between them that is none of theirs, and their own."""
    first = np.cumsum([size + 1 for size in sizes]) - np.array(sizes, int) if sizes else []
    windows = cut(np.array(first, np.int64), np.array(sizes, np.int64), window_length, overlap)
    own = [t for start, size in zip(first, sizes, strict=True) for t in range(start, start + size)]
    return windows, own


@given(SIZES, WINDOWS)
def test_every_token_is_scored_exactly_once_and_in_order(sizes, window):
    windows, own = cut_sizes(sizes, *window)
    scored = [t for s, e in zip(windows.scored, windows.end, strict=True) for t in range(s, e)]
    assert scored == own
    assert windows.num_scored.sum() == len(own)


@given(SIZES, WINDOWS)
def test_windows_are_as_long_as_they_may_be_and_overlap_as_asked(sizes, window):
    window_length, overlap = window
    windows, own = cut_sizes(sizes, window_length, overlap)
    stretch_of = {t: number for number, t in enumerate(own)}
    assert np.all(windows.lengths <= window_length)
    assert np.all(windows.lengths >= 1)
    for begin, scored, end in zip(windows.begin, windows.scored, windows.end, strict=True):
        assert set(range(begin, end)) <= stretch_of.keys()  # never outside of its stretch
        starts_stretch = begin - 1 not in stretch_of
        assert scored - begin == (0 if starts_stretch else overlap)
        if end in stretch_of:  # the stretch goes on
            assert end - begin == window_length


@given(SIZES.filter(any), WINDOWS, st.integers(1, 200))
def test_fewer_windows_are_as_many_as_fit_and_lie_from_end_to_end(sizes, window, more):
    windows, own = cut_sizes(sizes, *window)
    max_tokens = window[0] + more
    chosen = spread_evenly(windows, max_tokens)
    if len(own) <= max_tokens:
        assert chosen is windows
        return
    places = np.searchsorted(windows.begin, chosen.begin)
    assert len(set(places.tolist())) == len(chosen) >= 1
    assert np.array_equal(windows.end[places], chosen.end)
    assert chosen.num_scored.sum() <= max_tokens
    if len(chosen) > 1:
        assert places[0] == 0
        assert places[-1] == len(windows) - 1
        assert np.diff(places).max() - np.diff(places).min() <= 1


def test_of_equal_windows_as_many_are_taken_as_fit():
    windows, _ = cut_sizes([100], 10, 0)
    for max_tokens in range(10, 100):
        assert len(spread_evenly(windows, max_tokens)) == max_tokens // 10


def test_a_stretch_without_tokens_has_no_window():
    assert len(cut_sizes([0, 0], 4, 0)[0]) == 0
    assert len(cut_sizes([], 4, 0)[0]) == 0


@pytest.mark.parametrize(("size", "count"), [(1, 1), (8, 1), (9, 2), (14, 2), (15, 3), (20, 3)])
def test_an_overlap_asks_for_more_windows(size, count):
    windows, _ = cut_sizes([size], 8, 2)
    assert len(windows) == count
