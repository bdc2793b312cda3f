"""Weights by size: p^(1/T), renormalised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.mixture.natural import natural_weights


def test_at_temperature_one_every_token_has_the_same_chance():
    np.testing.assert_allclose(natural_weights([1, 2, 5]), [0.125, 0.25, 0.625])


def test_the_temperature_is_the_inverse_of_the_exponent():
    np.testing.assert_allclose(natural_weights([1, 4, 9], 2.0), np.array([1, 2, 3]) / 6)
    np.testing.assert_allclose(natural_weights([1, 2, 3], 0.5), np.array([1, 4, 9]) / 14)


def test_a_domain_without_tokens_has_no_weight_at_any_temperature():
    for temperature in (0.1, 1.0, 1e6):
        assert natural_weights([3, 0, 3], temperature).tolist() == [0.5, 0.0, 0.5]


@given(
    st.lists(st.integers(1, 10**15), min_size=1, max_size=20),
    st.floats(1e-300, 1e300, allow_subnormal=False),
)
def test_any_sizes_and_any_temperature_give_a_mixture(tokens, temperature):
    weights = natural_weights(tokens, temperature)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    order = np.argsort(tokens, kind="stable")
    assert (np.diff(weights[order]) >= 0).all()


def test_it_goes_from_the_largest_alone_to_uniform():
    np.testing.assert_allclose(natural_weights([1, 2, 4], 1e-3), [0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(natural_weights([1, 2, 4], 1e9), [1 / 3] * 3)


@pytest.mark.parametrize(
    ("tokens", "temperature", "problem"),
    [
        ([0, 0], 1.0, "there are no tokens"),
        ([], 1.0, "there are no tokens"),
        ([1, -1], 1.0, "numbers from 0 on"),
        ([1, np.nan], 1.0, "numbers from 0 on"),
        ([[1, 2]], 1.0, "must be a vector"),
        ([1, 2], 0.0, "temperature is 0.0"),
        ([1, 2], np.inf, "temperature is inf"),
    ],
)
def test_what_gives_no_mixture_is_refused(tokens, temperature, problem):
    with pytest.raises(ValueError, match=problem):
        natural_weights(tokens, temperature)
