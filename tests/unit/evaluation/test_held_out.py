"""Windows over held-out text compared with a plain enumeration, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Protocol
from megatron_chameleon.evaluation.held_out import (
    HeldOutText,
    ScoredWindows,
    cut_windows,
    held_out_text,
    spread_evenly,
)
from megatron_chameleon.evaluation.perplexity import batches
from tests.unit.evaluation.plain_protocol import (
    DOCUMENTS,
    EOD,
    predictions,
    protocols,
    token_file,
)

SIZES = st.lists(st.integers(0, 50), max_size=10)
WINDOWS = st.integers(1, 20).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(0, length - 1))
)


def cut_sizes(
    sizes: list[int], window_length: int, overlap: int
) -> tuple[ScoredWindows, list[int]]:
    """Windows over ranges of these sizes, one token apart, and the tokens of the ranges."""
    first = np.cumsum([size + 1 for size in sizes]) - np.array(sizes, int) if sizes else []
    windows = cut_windows(
        np.array(first, np.int64), np.array(sizes, np.int64), window_length, overlap
    )
    own = [t for start, size in zip(first, sizes, strict=True) for t in range(start, start + size)]
    return windows, own


@given(SIZES, WINDOWS)
def test_every_token_is_scored_once_and_in_order(sizes, window):
    windows, own = cut_sizes(sizes, *window)
    scored = [t for s, e in zip(windows.scored, windows.end, strict=True) for t in range(s, e)]
    assert scored == own
    assert windows.num_scored.sum() == len(own)


@given(SIZES.filter(any), WINDOWS, st.integers(1, 200))
def test_chosen_windows_fit_the_limit_and_are_spread(sizes, window, more):
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


def scored(text: HeldOutText, batch_size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(context, label) of everything that the batches of ``text`` score."""
    for first, last, width in batches(text, batch_size):
        tokens, labels, mask = text.batch(first, last, width)
        assert tokens.shape == labels.shape == mask.shape == (last - first, width)
        assert tokens.dtype == labels.dtype == torch.int64
        for row, place in mask.nonzero().tolist():
            yield tuple(tokens[row, : place + 1].tolist()), int(labels[row, place])


@given(DOCUMENTS, protocols(), st.integers(1, 7), st.booleans())
def test_every_token_is_scored_once_from_the_context_that_the_protocol_says(
    documents, protocol, batch_size, is_sorted
):
    expected = [(one.context, one.label) for one in predictions(documents, protocol)]
    text = held_out_text(token_file(documents), protocol, EOD)
    if text is None:
        assert expected == []
        return
    if is_sorted:
        lengths = text.longest_first().windows.lengths
        assert np.all(np.diff(lengths) <= 0)
        assert sorted(scored(text.longest_first(), batch_size)) == sorted(expected)
    else:
        # Batches are as wide as their first window: one by one, in the order of the text.
        rows = [text.batch(row, row + 1) for row in range(len(text.windows))]
        found = [
            (tuple(tokens[0, : place + 1].tolist()), int(labels[0, place]))
            for tokens, labels, mask in rows
            for place in mask[0].nonzero()[:, 0].tolist()
        ]
        assert found == expected


def test_text_with_nothing_to_score_is_none():
    packed = Protocol("test", 4)
    inside = Protocol("test", 4, packing="documents")
    without_ends = dataclasses.replace(packed, end_of_document=False)
    assert held_out_text(token_file([]), packed, EOD) is None
    assert held_out_text(token_file([[EOD]]), packed, EOD) is None
    assert held_out_text(token_file([[EOD], [EOD], []]), inside, EOD) is None
    assert held_out_text(token_file([[EOD], [EOD]]), without_ends, EOD) is None
    assert held_out_text(token_file([[EOD], [EOD]]), packed, EOD) is not None
