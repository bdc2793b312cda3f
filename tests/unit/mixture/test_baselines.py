"""Weights by size, and weights under caps next to a general solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from megatron_chameleon.mixture import capped_weights
from megatron_chameleon.mixture.natural import natural_weights


def by_optimizer(target, caps):
    """The same minimum by a general solver."""
    k = len(target)
    found = minimize(
        lambda w: float((w * np.log(np.maximum(w, 1e-300) / target)).sum()),
        np.minimum(caps, 1.0) / np.minimum(caps, 1.0).sum(),
        jac=lambda w: np.log(np.maximum(w, 1e-300) / target) + 1,
        bounds=[(1e-12, min(cap, 1.0)) for cap in caps],
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(k)},
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert found.success, found.message
    return found.x


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_mixture_of_smallest_divergence(seed):
    generator = np.random.default_rng(seed)
    target = generator.dirichlet(np.ones(6))
    caps = generator.dirichlet(np.ones(6)) * generator.uniform(1.05, 3)
    found = capped_weights(target, caps)
    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert (found.weights <= caps + 1e-15).all()
    np.testing.assert_allclose(found.weights, by_optimizer(target, caps), atol=2e-6)


def test_a_cap_that_binds_only_because_others_do_is_found():
    """0.3 fits under 0.35 until the first domain gives its weight away."""
    found = capped_weights([0.6, 0.3, 0.1], [0.2, 0.35, 1.0])
    np.testing.assert_allclose(found.weights, [0.2, 0.35, 0.45])
    assert found.binding == (0, 1)


@pytest.mark.parametrize("k", [2, 7, 59])
def test_caps_that_sum_to_one_up_to_rounding_are_accepted(k):
    """As if the budget is all of the text."""
    caps = np.ones(k) * (1.0 / k) * (1 - 1e-15)
    found = capped_weights(np.full(k, 1 / k), caps)
    np.testing.assert_allclose(found.weights, caps, rtol=1e-12)
    with pytest.raises(ValueError, match="less than 1"):
        capped_weights(np.full(k, 1 / k), caps * (1 - 1e-9))


def test_the_temperature_is_the_inverse_of_the_exponent():
    np.testing.assert_allclose(natural_weights([1, 4, 0, 9], 2.0), np.array([1, 2, 0, 3]) / 6)
    np.testing.assert_allclose(natural_weights([1, 2, 3], 0.5), np.array([1, 4, 9]) / 14)


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
