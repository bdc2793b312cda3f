from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend import greedy
from megatron_chameleon.blend.index import blending_indices_reference
from tests.unit.blend.blend_weights import hard_weights

WEIGHTS = st.lists(st.floats(-1, 1, allow_subnormal=True), min_size=1, max_size=12).map(
    lambda values: np.array(values) + 0.0
)


def fill(weights, counts, first, stop, tops=greedy.NO_TOPS):
    outputs = np.full(stop - first, -1, np.int16), np.full(stop - first, -1, np.int64)
    greedy.fill(weights, counts, first, stop, *outputs, tops)
    return outputs


def counts_of(index, num_domains):
    return np.bincount(index, minlength=num_domains).astype(np.float64)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 120), st.integers(0, 120))
def test_the_rule_can_be_taken_up_anywhere(weights, first, further):
    index, numbers = blending_indices_reference(weights.tolist(), first + further)
    counts = counts_of(index[:first], weights.size)
    found = fill(weights, counts, first, first + further)
    np.testing.assert_array_equal(found[0], index[first:])
    np.testing.assert_array_equal(found[1], numbers[first:])
    np.testing.assert_array_equal(counts, counts_of(index, weights.size))


def test_counting_alone_comes_to_the_same_counts():
    weights = np.array([0.5, 0.3, 0.2])
    kept, counted = np.zeros(3), np.zeros(3)
    fill(weights, kept, 0, 1001)
    greedy.fill(
        weights, counted, 0, 1001, np.empty(0, np.int16), np.empty(0, np.int64), greedy.NO_TOPS
    )
    np.testing.assert_array_equal(kept, counted)
    assert kept.sum() == 1001


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 50), st.lists(st.integers(0, 80), min_size=1, max_size=20))
def test_reading_some_samples(weights, first, offsets):
    samples = np.sort(first + np.array(offsets))
    index, numbers = blending_indices_reference(weights.tolist(), first + 81)
    counts = counts_of(index[:first], weights.size)
    found = np.empty(samples.size, np.int16), np.empty(samples.size, np.int64)
    greedy.read(weights, counts, first, samples, *found)
    np.testing.assert_array_equal(found[0], index[samples])
    np.testing.assert_array_equal(found[1], numbers[samples])
    np.testing.assert_array_equal(counts, counts_of(index[: samples[-1]], weights.size))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8), st.data())
def test_following_a_wrong_guess_until_it_agrees(values, data):
    weights = np.array(values) / sum(values)
    first, length = 40, 400
    index, numbers = blending_indices_reference(weights.tolist(), first + length)
    truth = counts_of(index[:first], weights.size)
    # As many samples, otherwise given out.
    taken, given = (data.draw(st.integers(0, weights.size - 1)) for _ in range(2))
    guessed = truth.copy()
    guessed[taken] -= 1
    guessed[given] += 1
    ends = guessed.copy()
    found = fill(weights, ends, first, first + length)
    counts = truth.copy()
    steps = greedy.follow(weights, counts, guessed, first, first + length, *found)
    if steps > length:
        assert not np.array_equal(counts, ends)
        np.testing.assert_array_equal(counts, counts_of(index, weights.size))
    else:
        np.testing.assert_array_equal(counts, counts_of(index[: first + steps], weights.size))
    np.testing.assert_array_equal(found[0], index[first:])
    np.testing.assert_array_equal(found[1], numbers[first:])
    assert (steps == 0) == (taken == given)


@pytest.mark.parametrize("num_domains", [2, 7, 40])
def test_guesses_give_out_every_sample_and_are_close(num_domains):
    for name, weights in hard_weights(num_domains).items():
        truth, tops = np.zeros(num_domains), np.full(num_domains, np.nan)
        fill(weights, truth, 0, 20_000, tops)
        guessed = np.empty(num_domains)
        greedy.guess_one(weights, tops, 20_000, guessed)
        assert guessed.sum() == 20_000, name
        assert (guessed >= 0).all(), name
        if name in ("even", "concentrated", "equal", "rare"):
            assert np.abs(guessed - truth).max() <= 1, name


def test_tops_are_the_errors_at_which_domains_are_chosen():
    weights = np.array([0.618034, 0.381966, 1e-9])
    tops = np.full(3, np.nan)
    index, _ = fill(weights, np.zeros(3), 0, 1000, tops)
    samples = np.arange(1000)
    for domain in (0, 1):
        chosen = samples[index == domain]
        errors = weights[domain] * chosen - np.arange(chosen.size)
        assert errors.min() - 1e-9 <= tops[domain] <= errors.max() + 1e-9
    assert np.isnan(tops[2])


def test_tops_are_corrected_by_what_was_seen():
    # Errors before the stretches, at samples 10, 20 and 30: 0.5, 0.6 and 0.1 of the first domain.
    starts = np.array([[0.5, 5.0], [1.4, 10.0], [2.9, 15.0]])
    tops = np.array([0.2, np.nan])
    greedy.learn_tops(np.array([0.1, 0.5]), tops, starts, 10, 10)
    assert tops[0] == pytest.approx(0.6)
    assert np.isnan(tops[1])


@settings(deadline=None)
@given(
    WEIGHTS,
    st.lists(st.floats(-1e18, 1e18), min_size=12, max_size=12),
    st.integers(0, 2**50),
    st.floats(1e-9, 1e6),
)
def test_a_guess_comes_to_an_end_whatever_the_tops(weights, tops, sample, scale):
    counts = np.full(weights.size, np.nan)
    greedy.guess_one(weights * scale, np.array(tops)[: weights.size], sample, counts)
    assert np.isfinite(counts).all()
