"""DoGE's rule: by hand, on gradients as plain vectors, on problems with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.doge import (
    DogeRecipe,
    DogeState,
    Roles,
    alignments,
    clip_factors,
    gradient_weights,
)

RATE = 0.1


def everything(k):
    return Roles(tuple(range(k)), tuple(range(k)))


def step(state, gradients, recipe, roles, present=None, rate=RATE):
    """The state after a batch with these gradients [k, n], and the combined gradient."""
    products = gradients @ gradients.T
    present = range(len(gradients)) if present is None else present
    after = state.after(products, list(present), rate, recipe, roles)
    factors = clip_factors(products, recipe.max_norm)
    return after, gradient_weights(after, factors, list(present), roles) @ gradients


def plain_step(weights, gradients, recipe, roles, rate):
    """Algorithm 1 on vectors: the new weights and the update."""
    clipped = []
    for gradient in gradients:
        norm = np.linalg.norm(gradient)
        clipped.append(gradient * (recipe.max_norm / norm if norm > recipe.max_norm else 1.0))
    towards = sum(clipped[j] for j in roles.target)
    mean_norm = np.mean([np.linalg.norm(clipped[i]) for i in roles.train])
    scores = [rate * (clipped[i] @ towards) / (mean_norm + 1e-6) for i in roles.train]
    limited = np.clip(scores, rate * recipe.dw_min, rate * recipe.dw_max)
    grown = weights * np.exp(limited / recipe.mu)
    new = (1 - recipe.eps) * grown / grown.sum() + recipe.eps / len(grown)
    return new, sum(weight * clipped[i] for weight, i in zip(new, roles.train, strict=True))


@pytest.mark.parametrize(
    "roles", [everything(4), Roles((0, 1, 2), (3,)), Roles((0, 1, 2, 3), (1, 3))]
)
@pytest.mark.parametrize(
    "recipe",
    [DogeRecipe(), DogeRecipe(0.05, 0.1, -0.5, 0.7, 1.5), DogeRecipe(mu=1.0, max_norm=0.3)],
)
def test_many_steps_equal_the_algorithm_on_vectors(recipe, roles):
    rng = np.random.default_rng(0)
    state, weights = DogeState.first(4, roles), np.full(len(roles.train), 1 / len(roles.train))
    over_steps, moved = [], 0.0
    for number in range(20):
        gradients = rng.normal(size=(4, 9)) * rng.exponential(size=(4, 1)) + 0.1
        rate = 0.2 / (1 + number)
        state, update = step(state, gradients, recipe, roles, rate=rate)
        before = weights
        weights, expected = plain_step(weights, gradients, recipe, roles, rate)
        moved += np.abs(weights - before).sum() / 2
        np.testing.assert_allclose(state.weights, weights, rtol=1e-10)
        np.testing.assert_allclose(update, expected, rtol=1e-9, atol=1e-12)
        over_steps.append(weights)
    np.testing.assert_allclose(state.mean, np.mean(over_steps, axis=0), rtol=1e-10, atol=1e-30)
    assert state.counted == 20
    assert state.moved == pytest.approx(moved)
    assert np.ptp(weights) > 0.005


def test_an_absent_domain_keeps_its_inner_products():
    rng = np.random.default_rng(1)
    roles, recipe = everything(3), DogeRecipe(mu=1.0)
    first = rng.normal(size=(3, 5))
    state, _ = step(DogeState.first(3, roles), first, recipe, roles)
    second = rng.normal(size=(3, 5))
    second[1] = 0.0
    after, update = step(state, second, recipe, roles, present=[0, 2])
    assert after.products[1] == pytest.approx(state.products[1])
    assert after.products[0, 2] == pytest.approx(second[0] @ second[2])
    assert after.alignment == pytest.approx(alignments(after.products, roles))
    # The shares of the present domains sum to 1.
    shares = after.weights[[0, 2]] / after.weights[[0, 2]].sum()
    assert update == pytest.approx(shares @ second[[0, 2]])


@pytest.mark.parametrize("mu", [1e-300, 1e-12])
def test_a_tiny_mu_does_not_overflow(mu):
    rng = np.random.default_rng(2)
    roles, recipe = everything(3), DogeRecipe(mu=mu)
    state = DogeState.first(3, roles)
    for _ in range(5):
        with np.errstate(over="raise", invalid="raise"):
            state, update = step(state, rng.normal(size=(3, 4)), recipe, roles)
        assert np.isfinite(state.weights).all()
        assert np.isfinite(state.log_weights).all()
        assert np.isfinite(update).all()
        assert state.weights.sum() == pytest.approx(1.0)
    assert state.weights.max() == pytest.approx(1.0)
