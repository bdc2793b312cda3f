"""The minimum of a predicted loss over mixtures, within bounds and near a prior."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import rel_entr

from megatron_chameleon.mixture.mixing_laws import MixingLaws, law_optimum
from megatron_chameleon.mixture.optimum import (
    check_bounds,
    minimize_mixture,
    nearest_by_divergence,
    nearest_mixtures,
)


def laws_of(k: int, seed: int) -> MixingLaws:
    """Laws of k losses, each of which falls with the weight of its domain."""
    rng = np.random.default_rng(seed)
    exponents = rng.normal(0, 1, (k, k)) - 4 * np.eye(k)
    return MixingLaws(rng.uniform(1, 2, k), rng.uniform(0.5, 1.5, k), exponents)


@st.composite
def problems(draw):
    """A seed, and bounds [k] that contain a mixture; some weights are fixed or excluded."""
    k, seed = draw(st.integers(2, 7)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    inside = rng.dirichlet(np.full(k, 0.5))
    low = inside * rng.choice([0, 0.5, 1], k)
    high = np.minimum(inside + (1 - inside) * rng.choice([0, 0.1, 1], k), 1.0)
    return seed, low, high


@pytest.mark.parametrize("k", [3, 6, 20])
def test_convex_losses_reach_the_optimum_of_a_solver_with_gradients(k):
    laws, shares = laws_of(k, k), np.random.default_rng(k).dirichlet(np.ones(k))
    low, high = np.full(k, 0.2 / k), np.full(k, 3 / k)

    def loss(mixtures):
        return laws.predict(mixtures) @ shares

    found = minimize_mixture(loss, np.ones(k), low, high)
    exact = law_optimum(laws, shares, low, high, np.full(k, 1 / k))
    assert found.objective == pytest.approx(exact.predicted, abs=1e-5)
    np.testing.assert_allclose(found.weights, exact.weights, atol=5e-3)
    prior = np.random.default_rng(1).dirichlet(np.ones(k))
    near = minimize_mixture(loss, prior, low, high, kl=0.1)
    solved = minimize(
        lambda w: loss(w[None])[0] + 0.1 * rel_entr(w, prior).sum(),
        np.full(k, 1 / k),
        method="SLSQP",
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    assert near.objective + 0.1 * near.divergence == pytest.approx(solved.fun, abs=1e-5)
    assert near.divergence < found.divergence + rel_entr(found.weights, prior).sum()


def descend_by_mirror(gradient, loss, weights):
    """Minimize ``loss`` over the simplex by exponentiated gradients, with backtracking."""
    step, lowest = 1.0, loss(weights[None])[0]
    for _ in range(4000):
        moved = weights * np.exp(-step * (gradient(weights) - gradient(weights) @ weights))
        moved /= moved.sum()
        reached = loss(moved[None])[0]
        if reached <= lowest:
            weights, lowest, step = moved, reached, 1.2 * step
        else:
            step /= 2
    return weights, lowest


@pytest.mark.parametrize("k", [20, 200])
def test_many_domains_reach_the_optimum_of_mirror_descent(k):
    """The loss is a sum of power laws with different curvatures, and transfer between domains."""
    rng, prior = np.random.default_rng(k), np.full(k, 1 / k)
    scale, transfer = rng.uniform(0.5, 2, k), np.eye(k) + rng.uniform(0, 0.2 / k, (k, k))

    def loss(mixtures):
        return (mixtures @ transfer.T + 1 / k) ** -0.5 @ scale / k**1.5

    def gradient(weights):
        return (-0.5 * (weights @ transfer.T + 1 / k) ** -1.5 * scale) @ transfer / k**1.5

    weights, lowest = descend_by_mirror(gradient, loss, prior)
    found = minimize_mixture(loss, prior, np.zeros(k), np.ones(k))
    assert loss(prior[None])[0] - lowest > 1e-2
    assert found.objective - lowest < 1e-3 * (loss(prior[None])[0] - lowest)
    assert np.abs(found.weights - weights).sum() / 2 < 0.01
    assert found.num_values < 35_000


def test_the_global_minimum_of_steps_is_found():
    """A loss without gradients, as of trees: a deep, narrow minimum next to a wide one."""
    best = np.array([0.05, 0.8, 0.1, 0.05])

    def steps(mixtures):
        wide = np.abs(mixtures - 0.25).sum(axis=1)
        narrow = 4 * np.abs(mixtures - best).sum(axis=1) - 1
        return np.round(10 * np.minimum(wide, narrow)) / 10

    found = minimize_mixture(steps, np.ones(4), np.zeros(4), np.ones(4))
    assert found.objective == -1
    np.testing.assert_allclose(found.weights, best, atol=0.02)


@settings(deadline=None, max_examples=25)
@given(problems())
def test_bounds_hold_exactly_and_a_large_penalty_gives_the_prior(problem):
    seed, low, high = problem
    rng = np.random.default_rng(seed)
    prior, centre = rng.dirichlet(np.ones(len(low))), rng.dirichlet(np.ones(len(low)))

    def distance(mixtures):
        return ((mixtures - centre) ** 2).sum(axis=1)

    found = minimize_mixture(distance, prior, low, high, num_draws=50)
    near = minimize_mixture(distance, prior, low, high, kl=1e6, num_draws=50)
    projected = nearest_mixtures(np.stack([centre, prior]), low, high)
    for weights in (found.weights, near.weights, *projected):
        assert ((low <= weights) & (weights <= high)).all()
        assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert found.objective == pytest.approx(distance(projected[:1])[0], abs=1e-4)
    inside = nearest_by_divergence(prior, low, high)
    assert near.divergence == pytest.approx(rel_entr(inside, prior).sum(), abs=1e-6)
    scales = (inside / prior)[(low < inside) & (inside < high)]
    np.testing.assert_allclose(scales, scales.mean() if len(scales) else 0, rtol=1e-9)


def test_priors_of_any_size_are_placed_within_bounds():
    found = nearest_by_divergence(
        np.array([1.0, 1e-20, 3e-21, 1e-300]), np.zeros(4), np.array([0.5, 1.0, 1.0, 1.0])
    )
    np.testing.assert_allclose(found, [0.5, 0.5 / 1.3, 0.15 / 1.3, 0.5e-280 / 1.3], rtol=1e-12)
    caps = np.array([0.1, 0.2, 0.3, 1.0])
    found = nearest_by_divergence(np.array([1.0, 1e-100, 1e-200, 1e-300]), np.zeros(4), caps)
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4], rtol=1e-12)


def test_a_domain_without_prior_gets_no_weight_under_the_penalty():
    prior = np.array([0.5, 0.5, 0.0])
    found = minimize_mixture(lambda w: w[:, 0], prior, np.zeros(3), np.ones(3), kl=0.1)
    assert found.weights[2] == 0
    assert np.isfinite(found.divergence)


@pytest.mark.parametrize(
    ("low", "high"), [([0.6, 0.6], [1, 1]), ([0, 0], [0.4, 0.4]), ([0.5, 0], [0.4, 1])]
)
def test_bounds_without_a_mixture_are_rejected(low, high):
    with pytest.raises(ValueError, match="weight"):
        check_bounds(np.array(low), np.array(high))
