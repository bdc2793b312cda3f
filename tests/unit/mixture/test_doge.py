"""The update rule of DoGE, compared with a simple implementation."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.doge import (
    DogeRule,
    DogeState,
    Roles,
    alignments,
    clip_factors,
    gradient_weights,
)


def everything(k):
    return Roles(tuple(range(k)), tuple(range(k)))


def step(state, gradients, rule, roles, present=None, rate=0.1):
    """Return the state after a batch with these gradients [k, n], and the combined gradient."""
    products = gradients @ gradients.T
    present = range(len(gradients)) if present is None else present
    after = state.after(products, list(present), rate, rule, roles)
    factors = clip_factors(products, rule.max_norm)
    return after, gradient_weights(after, factors, list(present), roles) @ gradients


def plain_step(weights, gradients, rule, roles, rate):
    """Compute Algorithm 1 on gradient vectors: the new weights and the combined gradient."""
    clipped = []
    for gradient in gradients:
        norm = np.linalg.norm(gradient)
        clipped.append(gradient * (rule.max_norm / norm if norm > rule.max_norm else 1.0))
    towards = sum(clipped[j] for j in roles.target)
    mean_norm = np.mean([np.linalg.norm(clipped[i]) for i in roles.train])
    scores = [rate * (clipped[i] @ towards) / (mean_norm + 1e-6) for i in roles.train]
    limited = np.clip(scores, rate * rule.dw_min, rate * rule.dw_max)
    grown = weights * np.exp(limited / rule.mu)
    new = (1 - rule.eps) * grown / grown.sum() + rule.eps / len(grown)
    return new, sum(weight * clipped[i] for weight, i in zip(new, roles.train, strict=True))


@pytest.mark.parametrize(
    "roles", [everything(4), Roles((0, 1, 2), (3,)), Roles((0, 1, 2, 3), (1, 3))]
)
@pytest.mark.parametrize(
    "rule",
    [DogeRule(), DogeRule(0.05, 0.1, -0.5, 0.7, 1.5), DogeRule(mu=1.0, max_norm=0.3)],
)
def test_doge_steps_equal_algorithm_1_on_gradient_vectors(rule, roles):
    rng = np.random.default_rng(0)
    state, weights = DogeState.first(4, roles), np.full(len(roles.train), 1 / len(roles.train))
    over_steps = []
    for number in range(20):
        gradients = rng.normal(size=(4, 9)) * rng.exponential(size=(4, 1)) + 0.1
        rate = 0.2 / (1 + number)
        state, update = step(state, gradients, rule, roles, rate=rate)
        weights, expected = plain_step(weights, gradients, rule, roles, rate)
        np.testing.assert_allclose(state.weights, weights, rtol=1e-10)
        np.testing.assert_allclose(update, expected, rtol=1e-9, atol=1e-12)
        over_steps.append(weights)
    np.testing.assert_allclose(state.mean, np.mean(over_steps, axis=0), rtol=1e-10, atol=1e-30)


def test_an_absent_domain_keeps_its_inner_products():
    rng = np.random.default_rng(1)
    roles, rule = everything(3), DogeRule(mu=1.0)
    first = rng.normal(size=(3, 5))
    state, _ = step(DogeState.first(3, roles), first, rule, roles)
    second = rng.normal(size=(3, 5))
    second[1] = 0.0
    after, update = step(state, second, rule, roles, present=[0, 2])
    assert after.products[1] == pytest.approx(state.products[1])
    assert after.products[0, 2] == pytest.approx(second[0] @ second[2])
    assert after.alignment == pytest.approx(alignments(after.products, roles))
    # The weights of the present domains sum to 1.
    shares = after.weights[[0, 2]] / after.weights[[0, 2]].sum()
    assert update == pytest.approx(shares @ second[[0, 2]])
