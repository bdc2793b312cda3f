from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend import greedy
from megatron_chameleon.blend.fixed_point import (
    MOST_DOMAINS,
    MOST_SAMPLES,
    fixed_point_kernel,
    suits,
)
from megatron_chameleon.blend.tiles import TILE
from megatron_chameleon.blend.vectors import LANES
from tests.unit.blend.blend_weights import hard_weights

LENGTH = 2 * TILE


def assert_follows_the_rule(weights, starts, first, keep=True):
    """From any counts [LANES, num_domains] before each stretch; how many tiles were filled anew."""
    samples = LANES * LENGTH if keep else 0
    found = np.full(samples, -1, np.int16), np.full(samples, -1, np.int64)
    ends = np.ascontiguousarray(starts.T)
    anew = fixed_point_kernel(keep)(weights, ends.ravel(), first, LENGTH, *found)
    for lane, counts in enumerate(starts.copy()):
        begin = first + lane * LENGTH
        expected = np.empty(LENGTH, np.int16), np.empty(LENGTH, np.int64)
        greedy.fill(weights, counts, begin, begin + LENGTH, *expected, greedy.NO_TOPS)
        np.testing.assert_array_equal(ends[:, lane], counts)
        if keep:
            part = slice(lane * LENGTH, (lane + 1) * LENGTH)
            np.testing.assert_array_equal(found[0][part], expected[0])
            np.testing.assert_array_equal(found[1][part], expected[1])
    return anew


def likely_counts(weights, first):
    starts = np.empty((LANES, weights.size))
    for lane in range(LANES):
        tops = np.full(weights.size, 0.5)
        greedy.guess_one(weights, tops, first + lane * LENGTH, starts[lane])
    return starts


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("first", [0, 12_345, MOST_SAMPLES - LANES * LENGTH])
@pytest.mark.parametrize("num_domains", [2, 3, 7, 17, 64, MOST_DOMAINS])
def test_follows_the_rule_for_all_weights(num_domains, first, keep):
    for weights in hard_weights(num_domains).values():
        if suits(weights):
            assert_follows_the_rule(weights, likely_counts(weights, first), first, keep)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=12),
    st.integers(0, 2**30),
    st.integers(-6, 6),
)
def test_follows_the_rule_from_counts_that_it_does_not_lead_to(values, first, off):
    weights = np.array(values) / max(1.0, sum(values))
    starts = likely_counts(weights, first)
    starts[::3, 0] += off
    starts[1::3, -1] += off / 2
    assert_follows_the_rule(weights, np.floor(np.abs(starts)), first)


def test_only_what_is_close_is_filled_anew():
    weights = hard_weights(7)["even"]
    assert assert_follows_the_rule(weights, likely_counts(weights, 10**6), 10**6) <= 2
    ties = np.array([0.4, 0.3, 0.2, 0.1])
    anew = assert_follows_the_rule(ties, likely_counts(ties, 10**6), 10**6)
    assert anew > 0.9 * LANES * LENGTH / TILE


@pytest.mark.parametrize(
    "weights", [[-0.1, 1.1], [1.5, 0.1], [1 / (MOST_DOMAINS + 1)] * (MOST_DOMAINS + 1)]
)
def test_weights_that_do_not_suit(weights):
    assert not suits(np.array(weights))
