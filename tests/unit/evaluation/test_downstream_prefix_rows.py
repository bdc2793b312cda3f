"""Rows in which shared beginnings stand once: every sequence is in them, as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.evaluation.downstream.prefix_rows import (
    Packing,
    batches,
    pack,
    shared_length,
)

ALWAYS = Packing(longest=10_000, token_work=1.0, pair_work=0.0)
NEVER = Packing(longest=0, token_work=1.0, pair_work=0.0)

# Few tokens, so that beginnings are often shared; 300 takes two bytes.
SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 2, 300]), min_size=1, max_size=6), min_size=1)


def arrays(lists):
    return [np.array(each, dtype=np.int32) for each in lists]


def seen_by(row, place):
    """The tokens that the token at ``place`` sees, in order, with their positions."""
    places = np.flatnonzero(row.visible()[place])
    return row.all_tokens()[places].tolist(), row.positions()[places].tolist()


@pytest.mark.parametrize(
    "packing", [ALWAYS, NEVER, Packing(longest=8, token_work=10.0, pair_work=1.0)]
)
@given(lists=SEQUENCES, data=st.data())
def test_each_token_sees_its_own_sequence_and_nothing_else(packing, lists, data):
    counts = [data.draw(st.integers(0, len(each))) for each in lists]
    rows = pack(arrays(lists), counts, packing)
    found = {number: (row, places) for row in rows for number, places in row.predicting}
    assert sorted(found) == list(range(len(lists)))
    for number, each in enumerate(lists):
        row, places = found[number]
        assert len(places) == counts[number]
        for end, place in zip(range(len(each) - counts[number], len(each)), places, strict=True):
            assert seen_by(row, place) == (each[: end + 1], list(range(end + 1)))


@given(lists=SEQUENCES)
def test_where_all_may_share_each_beginning_stands_once(lists):
    beginnings = {tuple(each[: n + 1]) for each in lists for n in range(len(each))}
    rows = pack(arrays(lists), [1] * len(lists), ALWAYS)
    assert sum(row.length for row in rows) == len(beginnings)
    assert len(rows) == len({each[0] for each in lists})


@given(lists=SEQUENCES)
def test_where_none_may_share_each_sequence_has_a_row(lists):
    rows = pack(arrays(lists), [1] * len(lists), NEVER)
    assert sorted(row.length for row in rows) == sorted(map(len, lists))
    assert all(row.is_chain for row in rows)


def test_answers_to_one_question_share_its_row():
    question = list(range(50))
    rows = pack(arrays([[*question, 90, 91], [*question, 95], question]), [2, 1, 1], ALWAYS)
    (row,) = rows
    assert row.length == 53
    assert not row.is_chain
    assert row.positions().tolist() == [*range(50), 50, 51, 50]


def test_a_row_is_a_chain_where_sequences_go_on_one_another():
    (row,) = pack(arrays([[1, 2], [1, 2, 3], [1, 2, 3]]), [1, 1, 1], ALWAYS)
    assert row.length == 3
    assert row.is_chain
    assert row.visible().tolist() == np.tri(3, dtype=bool).tolist()


def test_sharing_has_to_save_more_than_looking_at_each_other_costs():
    packing = Packing(longest=1000, token_work=100.0, pair_work=1.0)
    # Together 190 tokens: 190^2 - 100^2 - 100^2 pairs more, for 10 tokens less.
    assert not packing.joins(row_length=100, sequence_length=100, shared=10)
    assert packing.joins(row_length=100, sequence_length=100, shared=80)
    assert not packing.joins(row_length=990, sequence_length=90, shared=79)  # 1001 tokens
    assert not packing.joins(row_length=0, sequence_length=5, shared=0)


@pytest.mark.parametrize(
    ("tokens_at_once", "expected"),
    [
        (16, [[10], [9], [8, 7], [6, 5], [4, 3], [2], [1]]),
        (1000, [[10, 9, 8], [7, 6], [5, 4], [3], [2], [1]]),
    ],
)
def test_batches_are_of_like_lengths_and_hold_as_many_tokens_as_they_may(tokens_at_once, expected):
    rows = pack(arrays([[n] * (n + 1) for n in range(10)]), [1] * 10, NEVER)
    found = [[row.length for row in batch] for batch in batches(rows, tokens_at_once)]
    assert found == expected


def test_a_row_that_is_longer_than_a_batch_may_be_is_a_batch():
    rows = pack(arrays([[1, 2, 3, 4]]), [1], NEVER)
    assert [len(batch) for batch in batches(rows, tokens_at_once=2)] == [1]


def test_shared_length_is_up_to_the_first_difference():
    first, second = arrays([[1, 2, 3], [1, 2, 4, 3]])
    assert shared_length(first, second) == 2
    assert shared_length(first, first) == 3
    assert shared_length(first[:0], first) == 0
