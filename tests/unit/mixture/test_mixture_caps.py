from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from megatron_chameleon.mixture import capped_weights


def by_optimizer(wanted, caps):
    """The same minimum by a general solver."""
    k = len(wanted)
    found = minimize(
        lambda w: float((w * np.log(np.maximum(w, 1e-300) / wanted)).sum()),
        np.minimum(caps, 1.0) / np.minimum(caps, 1.0).sum(),
        jac=lambda w: np.log(np.maximum(w, 1e-300) / wanted) + 1,
        bounds=[(1e-12, min(cap, 1.0)) for cap in caps],
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(k)},
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert found.success, found.message
    return found.x


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_mixture_of_smallest_divergence(seed):
    generator = np.random.default_rng(seed)
    wanted = generator.dirichlet(np.ones(6))
    caps = generator.dirichlet(np.ones(6)) * generator.uniform(1.05, 3)
    found = capped_weights(wanted, caps)
    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert (found.weights <= caps + 1e-15).all()
    np.testing.assert_allclose(found.weights, by_optimizer(wanted, caps), atol=2e-6)


def test_domains_that_are_free_keep_their_ratios():
    found = capped_weights([0.5, 0.3, 0.15, 0.05], [0.2, np.inf, np.inf, 0.055])
    assert found.binding == (0, 3)
    assert found.weights[0] == 0.2
    assert found.weights[3] == 0.055
    assert found.weights[1] / found.weights[2] == pytest.approx(2)


def test_a_cap_that_binds_only_because_others_do_is_found():
    """0.3 fits under 0.35 until the first domain gives its weight away."""
    found = capped_weights([0.6, 0.3, 0.1], [0.2, 0.35, 1.0])
    np.testing.assert_allclose(found.weights, [0.2, 0.35, 0.45])
    assert found.binding == (0, 1)


def test_without_a_cap_that_binds_the_weights_are_what_was_wanted():
    found = capped_weights([0.5, 0.5], [0.5, np.inf])
    np.testing.assert_array_equal(found.weights, [0.5, 0.5])
    assert found.binding == (0,)
    assert capped_weights([0.5, 0.5], [0.6, 0.6]).binding == ()


def test_caps_that_leave_no_room_are_the_weights():
    found = capped_weights([0.9, 0.05, 0.05], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(found.weights, [0.5, 0.25, 0.25], atol=1e-12)


@pytest.mark.parametrize("k", range(2, 60))
def test_caps_that_sum_to_one_but_for_rounding_leave_no_room(k):
    """As the shares of all text do where the budget is all there is."""
    caps = np.ones(k) * (1.0 / k) * (1 - 1e-15)
    found = capped_weights(np.full(k, 1 / k), caps)
    np.testing.assert_allclose(found.weights, caps, rtol=1e-12)
    with pytest.raises(ValueError, match="less than 1"):
        capped_weights(np.full(k, 1 / k), caps * (1 - 1e-9))


def test_a_domain_that_is_not_wanted_gets_nothing():
    found = capped_weights([0.7, 0.3, 0.0], [0.5, 1.0, 1.0])
    np.testing.assert_allclose(found.weights, [0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match=r"sum to 0\.8, less than 1"):
        capped_weights([0.7, 0.3, 0.0], [0.5, 0.3, 1.0])


@pytest.mark.parametrize(
    ("weights", "caps", "problem"),
    [
        ([0.5, 0.5], [1.0], "vectors of one length"),
        ([], [], "vectors of one length"),
        ([0.5, -0.5], [1, 1], "not negative"),
        ([0.0, 0.0], [1, 1], "not all zero"),
        ([0.5, np.nan], [1, 1], "finite"),
        ([0.5, 0.5], [np.nan, 1], "from 0 on"),
        ([0.5, 0.5], [-1, 2], "from 0 on"),
        ([0.5, 0.5], [0.4, 0.5], r"sum to 0\.9, less than 1"),
    ],
)
def test_what_makes_no_sense_is_refused(weights, caps, problem):
    with pytest.raises(ValueError, match=problem):
        capped_weights(weights, caps)
