from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from megatron_chameleon.blend.megatron_order import (
    COUNTED,
    MAX_DOMAINS,
    MegatronOrder,
    build_blending_indices,
)
from tests.unit.blend.inputs import hard_weights


def compiled(weights, num_samples):
    """Run Megatron's own helper on the same input."""
    index = np.full(num_samples, -1, np.int16)
    sample_index = np.full(num_samples, -1, np.int64)
    weights = np.asarray(weights, dtype=np.float64)
    helpers.build_blending_indices(index, sample_index, weights, len(weights), num_samples, False)
    return index, sample_index


def assert_same(found, expected):
    for array, other in zip(found, expected, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


# There are enough samples for several rounds of all parallel lanes. Each lane starts from guessed
# counts; some weights make the guesses converge, and others do not.
@pytest.mark.parametrize("num_domains", [1, 2, 7, 17, 40, 600])
def test_blend_equals_the_compiled_helper_for_difficult_weights(num_domains):
    num_samples = 400_000 // max(1, num_domains // 10)
    for weights in (*hard_weights(num_domains), np.full(num_domains, 1e300)):
        out = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
        found = build_blending_indices(weights, num_samples, out)
        assert found[0] is out[0]
        assert_same(found, compiled(weights, num_samples))


def test_counts_and_locations_match_the_index():
    weights, num_samples = [0.5, 0.0, 0.3, 0.2], COUNTED * 2 + 5
    blended = MegatronOrder(weights, num_samples)
    index, numbers = compiled([0.5, 0.3, 0.2], num_samples)
    index = np.array([0, 2, 3])[index]
    for samples in (0, 1, COUNTED - 1, COUNTED, COUNTED + 1, num_samples):
        expected = np.bincount(index[:samples], minlength=4)
        assert blended.counts(samples).tolist() == expected.tolist()
    places = np.random.default_rng(0).integers(0, num_samples, 1000)
    found = blended.locate(places)
    np.testing.assert_array_equal(found[0], index[places])
    np.testing.assert_array_equal(found[1], numbers[places])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0, 1, allow_subnormal=True), min_size=1, max_size=20),
    st.integers(0, 300),
)
def test_blend_equals_the_compiled_helper(weights, num_samples):
    expected = compiled(weights, num_samples)
    assert_same(build_blending_indices(weights, num_samples), expected)


def test_invalid_weights_are_rejected():
    for weights in (np.ones(MAX_DOMAINS + 1), [0.5, float("nan")]):
        with pytest.raises(ValueError, match=r"domains|finite"):
            build_blending_indices(weights, 1)
