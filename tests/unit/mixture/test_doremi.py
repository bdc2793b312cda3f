"""The update rule of DoReMi, compared with simple implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

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
