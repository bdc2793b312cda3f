"""DoReMi's update rule: hand-computed steps, plain loops, limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_chameleon.mixture.doremi import (
    RECIPES,
    DoremiRecipe,
    DoremiState,
    token_weights,
)
from megatron_chameleon.mixture.exponentiated import (
    LOWEST_LOG,
)

ORIGINAL, FORK = RECIPES["original"], RECIPES["fork"]


def advanced(state, means, tokens, recipe):
    """The state after a batch with these mean excess losses."""
    tokens = np.array(tokens, float)
    return state.after(np.array(means, float) * tokens, tokens, recipe)


@pytest.mark.parametrize("eta", [1e3, 1e150, 1e308])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_no_step_size_overflows(eta, eps):
    recipe = DoremiRecipe(eta=eta, eps=eps)
    state = DoremiState.first(3, 50_000, recipe)
    for means in ([9.0, 1.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 0.0]):
        with np.errstate(invalid="raise", divide="raise"):
            state = advanced(state, means, [1, 1, 1], recipe)
        assert np.isfinite(state.log_weights).all()
        assert np.isfinite(state.mean).all()
        assert state.weights.sum() == pytest.approx(1)
    assert state.log_weights.min() >= LOWEST_LOG
    assert state.weights[2] < 0.01
    assert advanced(state, [0, 0, 1e4], [1, 1, 1], recipe).weights[2] > 0.99  # none is lost


def plain_variant(batches, fork):
    """The weights after each batch and their mean, token by token and step by step.

    Args:
        batches: of each step, the excess losses of the tokens of each domain.
        fork: clip domain means at 0, with steps of 0.1 and no smoothing, and average without the
            first weights; or clip tokens at 0, with steps of 1 and 0.1% that is uniform.
    """
    k = len(batches[0])
    alpha, last, seen = [1 / k] * k, [math.log(100)] * k, []
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
def test_many_steps_equal_plain_loops(variant):
    rng = np.random.default_rng(4)
    recipe = RECIPES[variant]
    batches = [
        [rng.normal(0.1 * i - 0.1, 0.5, rng.integers(6)) for i in range(4)] for _ in range(25)
    ]
    weights, mean = plain_variant(batches, fork=variant == "fork")
    other, _ = plain_variant(batches, fork=variant != "fork")
    state = DoremiState.first(4, 100, recipe)
    for batch, expected in zip(batches, weights, strict=True):
        # As in the hook.
        clipped = [np.maximum(part, recipe.floor) if recipe.clip_tokens else part for part in batch]
        sums = np.array([part.sum() for part in clipped])
        state = state.after(sums, np.array([float(len(part)) for part in batch]), recipe)
        assert_allclose(state.weights, expected, rtol=1e-9)
    assert_allclose(state.mean, mean, rtol=1e-9)
    assert np.abs(np.array(other[-1]) - weights[-1]).max() > 0.01


def test_the_loss_of_a_batch_is_a_weighted_mean():
    rng = np.random.default_rng(1)
    alpha, sampling = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    tokens = np.array([5.0, 3.0, 2.0])
    losses = [rng.random(int(count)) for count in tokens]
    per_token = alpha / sampling
    expected = sum((w * loss).sum() for w, loss in zip(per_token, losses, strict=True))
    expected /= per_token @ tokens
    weights = token_weights(np.log(alpha), sampling, tokens)
    found = sum((w * loss).sum() for w, loss in zip(weights, losses, strict=True)) / tokens.sum()
    assert found == pytest.approx(expected)


def test_token_weights_of_absent_domains_and_of_tiny_weights():
    log_weights, sampling = np.log([0.7, 0.2, 0.1]), np.full(3, 1 / 3)
    weights = token_weights(log_weights, sampling, np.array([0.0, 6.0, 3.0]))
    assert_allclose(weights, [0.0, 1.2, 0.6])
    assert not token_weights(log_weights, sampling, np.zeros(3)).any()
    log_weights = np.array([0.0, -2000.0, -2000.0 - math.log(2)])  # exp() underflows
    weights = token_weights(log_weights, sampling, np.array([0.0, 2.0, 2.0]))
    assert_allclose(weights, [0.0, 4 / 3, 2 / 3])
