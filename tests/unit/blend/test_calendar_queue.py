from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend import calendar_queue, greedy
from tests.unit.blend.blend_weights import hard_weights


def assert_follows_the_rule(weights, counts, first, samples, message=""):
    expected_counts = counts.copy()
    expected = np.empty(samples, np.int16), np.empty(samples, np.int64)
    greedy.fill(weights, expected_counts, first, first + samples, *expected, greedy.NO_TOPS)
    found = np.full(samples, -1, np.int16), np.full(samples, -1, np.int64)
    calendar_queue.fill(weights, counts, first, first + samples, *found, greedy.NO_TOPS)
    np.testing.assert_array_equal(found[0], expected[0], message)
    np.testing.assert_array_equal(found[1], expected[1], message)
    np.testing.assert_array_equal(counts, expected_counts, message)


@pytest.mark.parametrize("num_domains", [1, 2, 7, 8, 9, 64, 513, 2000])
def test_follows_the_rule_for_all_weights(num_domains):
    samples = 2_000_000 // max(num_domains, 100)
    for name, weights in hard_weights(num_domains).items():
        assert_follows_the_rule(weights, np.zeros(num_domains), 0, samples, name)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(-1, 1, allow_subnormal=True), min_size=1, max_size=30),
    st.integers(0, 3000),
    st.integers(0, 2**45),
)
def test_follows_the_rule_from_any_counts(values, samples, first):
    weights = np.array(values) + 0.0
    counts = np.zeros(weights.size)
    greedy.guess_one(weights, np.full(weights.size, 0.5), first, counts)
    assert_follows_the_rule(weights, counts, first, samples)


@pytest.mark.parametrize("name", ["even", "equal", "rare", "sum above one"])
def test_the_largest_weights(name):
    weights = hard_weights(20)[name]
    weights *= calendar_queue.MOST_WEIGHT / weights.max()
    assert_follows_the_rule(weights, np.zeros(20), 0, 5000)


def test_counting_alone_and_learning_tops():
    weights = hard_weights(600)["even"]
    counts, expected_counts = np.zeros(600), np.zeros(600)
    tops, expected_tops = np.full(600, np.nan), np.full(600, np.nan)
    nothing = np.empty(0, np.int16), np.empty(0, np.int64)
    greedy.fill(weights, expected_counts, 0, 20_000, *nothing, expected_tops)
    calendar_queue.fill(weights, counts, 0, 20_000, *nothing, tops)
    np.testing.assert_array_equal(counts, expected_counts)
    # Where no domain comes up to the floor the sample is given without learning from it.
    known = ~np.isnan(tops)
    assert known.sum() > 590
    assert np.abs(tops - expected_tops)[known].mean() < 0.01
