from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numba import njit

from megatron_chameleon.blend import greedy
from megatron_chameleon.blend.float_kernel import ARGUMENTS, BLOCK, float_kernel
from megatron_chameleon.blend.lanes import LaneFiller
from megatron_chameleon.blend.tiles import TILE
from megatron_chameleon.blend.vectors import LANES
from tests.addresses import at_offset
from tests.unit.blend.blend_weights import hard_weights

# Some fill the float64 kernel's blocks of domains and some do not; of some, an error's bits.
NUMBERS = [2, 3, 7, 16, 17, 32, 33, 50]


def outputs_for(samples):
    return np.full(samples, -1, np.int16), np.full(samples, -1, np.int64)


def unknown_tops(weights):
    """Nothing learned but one, without which there is no guess."""
    return np.append(0.5, np.full(weights.size - 1, np.nan))


def by_the_rule(weights, counts, first, samples):
    found = outputs_for(samples)
    greedy.fill(weights, counts, first, first + samples, *found, greedy.NO_TOPS)
    return found


@pytest.mark.parametrize("num_domains", NUMBERS)
def test_lanes_follow_the_rule_for_all_weights(num_domains):
    samples = 41_000
    for name, weights in hard_weights(num_domains).items():
        counts, expected_counts = np.zeros(num_domains), np.zeros(num_domains)
        expected = by_the_rule(weights, expected_counts, 0, samples)
        found = outputs_for(samples)
        LaneFiller(weights, True, unknown_tops(weights)).fill(counts, 0, samples, *found)
        np.testing.assert_array_equal(found[0], expected[0], name)
        np.testing.assert_array_equal(found[1], expected[1], name)
        np.testing.assert_array_equal(counts, expected_counts, name)


@pytest.mark.parametrize("offset", [0, 8, 16, 40])
def test_lanes_follow_the_rule_wherever_the_arrays_lie(offset):
    samples, num_domains = 20_000, 7
    for name, weights in hard_weights(num_domains).items():
        counts, expected_counts = at_offset(np.zeros(num_domains), offset), np.zeros(num_domains)
        expected = by_the_rule(weights, expected_counts, 0, samples)
        found = tuple(at_offset(array, offset) for array in outputs_for(samples))
        lanes = LaneFiller(at_offset(weights, offset), True, unknown_tops(weights))
        lanes.fill(counts, 0, samples, *found)
        np.testing.assert_array_equal(found[0], expected[0], name)
        np.testing.assert_array_equal(found[1], expected[1], name)
        np.testing.assert_array_equal(counts, expected_counts, name)


@pytest.mark.parametrize("num_domains", [7, 17, 33])
def test_counting_alone_comes_to_the_same_counts(num_domains):
    for name, weights in hard_weights(num_domains, seed=1).items():
        counts, expected_counts = np.zeros(num_domains), np.zeros(num_domains)
        by_the_rule(weights, expected_counts, 0, 33_000)
        nothing = np.empty(0, np.int16), np.empty(0, np.int64)
        LaneFiller(weights, False, unknown_tops(weights)).fill(counts, 0, 33_000, *nothing)
        np.testing.assert_array_equal(counts, expected_counts, name)


@pytest.mark.parametrize("num_domains", [5, 40])
@pytest.mark.parametrize("first", [1, 777_777, 2**40 + 1])
def test_lanes_can_start_anywhere(num_domains, first):
    weights = hard_weights(num_domains)["even"]
    counts = np.empty(num_domains)
    greedy.guess_one(weights, np.full(num_domains, 0.5), first, counts)
    expected_counts = counts.copy()
    expected = by_the_rule(weights, expected_counts, first, 30_000)
    found = outputs_for(30_000)
    lanes = LaneFiller(weights, True, unknown_tops(weights))
    lanes.fill(counts, first, first + 30_000, *found)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(counts, expected_counts)


@pytest.mark.parametrize("num_domains", [7, 33])
@pytest.mark.parametrize("top", [-300.0, -1.0, 0.0, 5.0])
def test_stretches_are_exact_however_wrong_the_guesses(num_domains, top):
    rng = np.random.default_rng(3)
    weights = hard_weights(num_domains)["concentrated"]
    tops = top * rng.random(num_domains)
    lanes = LaneFiller(weights, True, tops)
    length = 15 * TILE
    counts, expected_counts = np.zeros(num_domains), np.zeros(num_domains)
    expected = by_the_rule(weights, expected_counts, 0, 4 * LANES * length)
    start = 0
    for _ in range(3):
        found = outputs_for(LANES * length)
        starts = lanes.fill_stretches(counts, start, length, *found)
        for stretch, exact in enumerate(starts):
            begin = start + stretch * length
            before = np.bincount(expected[0][:begin], minlength=num_domains)
            np.testing.assert_array_equal(exact, before)
            part = slice(stretch * length, (stretch + 1) * length)
            for array, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(array[part], other[begin : begin + length])
        assert 1 <= len(starts) <= LANES
        start += len(starts) * length
    np.testing.assert_array_equal(counts, np.bincount(expected[0][:start], minlength=num_domains))


def test_lanes_are_made_of_vector_instructions():
    # Where LLVM gives up on the float64 kernel's loop over the lanes, it takes longer than the rule
    # itself; else about a fifth as long. Timing shows that on an idle machine only, the code
    # anywhere. (The int32 kernel is written in vector instructions.) It is compiled again because
    # numba inspects nothing that comes from its cache.
    cached: Any = float_kernel(True)
    compiled = njit("void" + ARGUMENTS)(cached.py_func)
    (code,) = compiled.inspect_llvm().values()
    assert len(re.findall(r"fmul <\d+ x double>", code)) >= BLOCK
