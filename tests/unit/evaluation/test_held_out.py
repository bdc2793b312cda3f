"""Windows over held-out text compared with a plain enumeration, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.evaluation.held_out import (
    HeldOutText,
    cut_windows,
    held_out_text,
    spread_evenly,
)
from megatron_chameleon.evaluation.perplexity import batches
from tests.unit.evaluation.plain_protocol import DOCUMENTS, EOD, predictions, protocols, token_file


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=10).filter(any),
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(1, 200),
)
def test_chosen_windows_fit_the_limit_and_are_spread(sizes, window, more):
    ends = np.cumsum(sizes)
    windows = cut_windows(ends - sizes, np.array(sizes), *window)
    max_tokens = window[0] + more
    chosen = spread_evenly(windows, max_tokens)
    if ends[-1] <= max_tokens:
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
        for row, place in mask.nonzero().tolist():
            yield tuple(tokens[row, : place + 1].tolist()), int(labels[row, place])


@given(DOCUMENTS, protocols(), st.integers(1, 7))
def test_every_token_is_scored_once_from_the_context_of_the_protocol(
    documents, protocol, batch_size
):
    expected = [(one.context, one.label) for one in predictions(documents, protocol)]
    text = held_out_text(token_file(documents), protocol, EOD)
    assert (text is None) == (expected == [])
    if text is not None:
        in_order = [label for _, labels in text.scored_blocks() for label in labels]
        assert in_order == [label for _, label in expected]
        assert sorted(scored(text.longest_first(), batch_size)) == sorted(expected)
