"""The update rules of DoReMi and DoGE, compared with simple implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_chameleon.mixture.doge import (
    DogeRule,
    DogeState,
    Roles,
    alignments,
    clip_factors,
    gradient_weights,
)
from megatron_chameleon.mixture.doremi import (
    VARIANTS,
    DoremiRule,
    DoremiState,
    domain_mean_weights,
    token_weights,
)
from megatron_chameleon.mixture.exponentiated import LOWEST_LOG


def advanced(state, means, tokens, rule):
    """Return the state after a batch with these mean excess losses."""
    tokens = np.array(tokens, float)
    return state.after(np.array(means, float) * tokens, tokens, rule)


@pytest.mark.parametrize("eta", [1e3, 1e150, 1e308])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_no_step_size_overflows(eta, eps):
    rule = DoremiRule(eta=eta, eps=eps)
    state = DoremiState.first(3, 50_000, rule)
    for means in ([9.0, 1.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 0.0]):
        with np.errstate(invalid="raise", divide="raise"):
            state = advanced(state, means, [1, 1, 1], rule)
        assert np.isfinite(state.log_weights).all()
        assert np.isfinite(state.mean).all()
        assert state.weights.sum() == pytest.approx(1)
    assert state.log_weights.min() >= LOWEST_LOG
    assert state.weights[2] < 0.01
    assert advanced(state, [0, 0, 1e4], [1, 1, 1], rule).weights[2] > 0.99  # the weight can grow


def plain_variant(batches, fork):
    """Compute the weights after each batch and their mean, by loops over tokens and steps.

    Args:
        batches: for each step, the excess losses of the tokens of each domain.
        fork: clip domain means at 0, start with excess losses of 0, take steps of 0.1, and average
            without the first weights. Otherwise clip tokens at 0, start with ln V, take steps of 1,
            and smooth with 0.1% of uniform weights.
    """
    k = len(batches[0])
    alpha, last, seen = [1 / k] * k, [0.0 if fork else math.log(100)] * k, []
    for batch in batches:
        for i, tokens in enumerate(batch):
            if len(tokens) and fork:
                last[i] = max(sum(tokens) / len(tokens), 0.0)
            elif len(tokens):
                last[i] = sum(max(x, 0.0) for x in tokens) / len(tokens)
        grown = [a * math.exp((0.1 if fork else 1.0) * x) for a, x in zip(alpha, last, strict=True)]
        eps = 0.0 if fork else 1e-3
        alpha = [(1 - eps) * a / sum(grown) + eps / k for a in grown]
        seen.append(alpha)
    counted = seen if fork else [[1 / k] * k, *seen]
    return seen, [sum(column) / len(counted) for column in zip(*counted, strict=True)]


@pytest.mark.parametrize("variant", ["original", "fork"])
def test_doremi_steps_equal_plain_loops(variant):
    rng = np.random.default_rng(4)
    rule = VARIANTS[variant]
    batches = [
        [rng.normal(0.1 * i - 0.1, 0.5, rng.integers(6)) for i in range(4)] for _ in range(25)
    ]
    weights, mean = plain_variant(batches, fork=variant == "fork")
    state = DoremiState.first(4, 100, rule)
    for batch, expected in zip(batches, weights, strict=True):
        # Clip and sum the tokens' excess losses as the hook does.
        clipped = [np.maximum(part, rule.floor) if rule.clip_tokens else part for part in batch]
        sums = np.array([part.sum() for part in clipped])
        state = state.after(sums, np.array([float(len(part)) for part in batch]), rule)
        assert_allclose(state.weights, expected, rtol=1e-9)
    assert_allclose(state.mean, mean, rtol=1e-9)


def test_token_weights_are_right_for_absent_domains_and_tiny_weights():
    log_weights, sampling = np.log([0.7, 0.2, 0.1]), np.full(3, 1 / 3)
    weights = token_weights(log_weights, sampling, np.array([0.0, 6.0, 3.0]))
    assert_allclose(weights, [0.0, 1.2, 0.6])
    log_weights = np.array([0.0, -2000.0, -2000.0 - math.log(2)])  # their exponentials underflow
    weights = token_weights(log_weights, sampling, np.array([0.0, 2.0, 2.0]))
    assert_allclose(weights, [0.0, 4 / 3, 2 / 3])


def test_the_fork_weights_mean_losses_without_renormalization():
    """0.7 / 6, absent, and 0.1 / 3 per token, times 9 tokens."""
    weights = domain_mean_weights(np.array([0.7, 0.2, 0.1]), np.array([6.0, 0.0, 3.0]))
    assert_allclose(weights, [1.05, 0.0, 0.3])
    losses = np.array([2.0] * 6 + [5.0] * 3)
    assert weights[[0] * 6 + [2] * 3] @ losses / 9 == pytest.approx(0.7 * 2 + 0.1 * 5)


def test_an_absent_domain_of_the_fork_starts_with_no_excess():
    """Domain 0 has an excess of 2 nats; 0.1 * 2 raises its weight by e^0.2 over the absent one."""
    state = advanced(DoremiState.first(2, 100, VARIANTS["fork"]), [2, 0], [1, 0], VARIANTS["fork"])
    assert_allclose(state.excess, [2.0, 0.0])
    assert state.weights[0] / state.weights[1] == pytest.approx(math.exp(0.2))


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
