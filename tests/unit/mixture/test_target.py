"""A prior over the domains, next to the paper's definition."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    affinity_matrix,
    chameleon_weights,
    domain_weights,
    similarity_shares,
    target_prior,
)

seeds = st.integers(0, 2**32 - 1)
recipes = st.sampled_from(["paper", "reference", "scaled"])
modes = st.sampled_from(["pretrain", "finetune"])


def weigh(embeddings, mode, recipe, prior=None, **overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(embeddings, mode, recipe, prior=prior, **overrides)


def problem(seed: int, most_domains: int = 9, most_features: int = 14):
    """Embeddings [k, h] of any scale, priors [k], and a generator."""
    rng = np.random.default_rng(seed)
    k, h = rng.integers(2, most_domains), rng.integers(1, most_features)
    embeddings = rng.normal(size=(k, h)) * 10 ** rng.uniform(-1, 2) + rng.normal(size=h)
    return embeddings, rng.uniform(0.1, 3.0, k), rng


def scores_by_definition(affinity, prior, ridge):
    """diag(K (K + k lambda diag(eta)^-1)^-1), as in the paper's appendix: the plain reference."""
    k = len(affinity)
    return np.diagonal(affinity @ np.linalg.inv(affinity + k * ridge * np.diag(1 / prior)))


@given(seeds, recipes, modes)
def test_scores_and_weights_are_those_of_the_definition(seed, recipe, mode):
    embeddings, prior, _ = problem(seed)
    result = weigh(embeddings, mode, recipe, prior, score_floor=1e-10, score_ceiling=np.inf)
    eta = prior / prior.mean()
    affinity = affinity_matrix(embeddings, result.recipe.center)
    expected = scores_by_definition(affinity, eta, result.effective_ridge)
    np.testing.assert_allclose(result.scores, expected, atol=1e-8)
    np.testing.assert_allclose(result.prior, eta, rtol=1e-12)
    shares = result.scores / result.scores.sum() if result.recipe.normalize else result.scores
    z = eta / shares if mode == "pretrain" else shares
    odds = np.exp((z - z.max()) / result.effective_temperature)
    np.testing.assert_allclose(result.weights, odds / odds.sum(), rtol=1e-7, atol=1e-9)


def christoffel(affinity, prior, ridge, i):
    """min_g sum_j eta_j / k g(x_j)^2 + lambda |g|^2 with g(x_i) = 1, for g = sum_j a_j K(x_j, .).

    Over a, by its Lagrangian: the minimum is 1 / (K_i Q^-1 K_i) with Q the quadratic form.
    """
    k = len(affinity)
    quadratic = affinity @ np.diag(prior / k) @ affinity + ridge * affinity
    solved = np.linalg.solve(quadratic, affinity[i])
    return 1 / (affinity[i] @ solved)


@given(seeds)
def test_pretraining_takes_the_christoffel_function(seed):
    """The variational problem itself, where K has full rank."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 6))
    embeddings, prior = rng.normal(size=(k, 3 * k)), rng.uniform(0.2, 3, k)
    prior /= prior.mean()
    result = weigh(embeddings, "pretrain", "paper", prior, ridge=0.3)
    values = [k * christoffel(result.affinity, prior, 0.3, i) for i in range(k)]
    np.testing.assert_allclose(prior / result.scores, values, rtol=1e-6)


@given(seeds, recipes, modes, st.floats(1e-300, 1e300))
def test_equal_priors_give_the_plain_weights_to_the_bit(seed, recipe, mode, value):
    embeddings, _, _ = problem(seed)
    plain = weigh(embeddings, mode, recipe)
    same = weigh(embeddings, mode, recipe, np.full(len(embeddings), value))
    assert same.prior is None
    np.testing.assert_array_equal(same.weights, plain.weights)
    np.testing.assert_array_equal(same.scores, plain.scores)
    assert same.degenerate == plain.degenerate


def test_the_limits_hold_what_is_inverted():
    scores, prior = np.array([0.5, 0.5, 0.5, 0.5]), np.array([3.7, 0.1, 0.1, 0.1])
    limits: dict[str, Any] = {"score_floor": 0.5, "score_ceiling": 4.0, "prior": prior}
    with pytest.warns(DegenerateScoreWarning, match="position 0, 1, 2, 3"):
        weights = domain_weights(scores, "pretrain", 1.0, True, **limits)
    # S / eta is held at 0.5 and 4 times the mean of S, and z = 4 / 0.5 or 4 / 4.
    np.testing.assert_allclose(weights[0] / weights[1], np.exp(8.0 - 1.0))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0.01, 0.99))
def test_the_prior_is_a_mean_of_target_and_uniform(shares, strength):
    shares[0] = 1.0
    prior = target_prior(shares, strength)
    expected = 1 - strength + strength * len(shares) * np.array(shares) / np.sum(shares)
    np.testing.assert_allclose(prior, expected, rtol=1e-9)
    assert prior.mean() == pytest.approx(1, rel=1e-9)
    assert prior.min() > 0
    if len(set(shares)) == 1:
        assert (prior == 1).all()


def test_shares_are_squared_cosines_with_the_target():
    rng = np.random.default_rng(5)
    mean = 100 * rng.normal(size=32)
    embeddings = mean + rng.normal(size=(6, 32))
    centered = embeddings - embeddings.mean(axis=0)
    text = embeddings.mean(axis=0) + 0.3 * centered[4] + 0.05 * rng.normal(size=32)
    shares = similarity_shares(embeddings, text)
    direction = text - embeddings.mean(axis=0)
    for share, row in zip(shares, centered, strict=True):
        cosine = row @ direction / np.linalg.norm(row) / np.linalg.norm(direction)
        assert share == pytest.approx(max(0.0, cosine) ** 2)
    assert shares.argmax() == 4
    assert shares[4] > 0.6 > 3 * np.delete(shares, 4).max()
    np.testing.assert_array_equal(similarity_shares(embeddings, embeddings.mean(axis=0)), 1.0)
    far = embeddings.mean(axis=0) + 50 * direction  # its distance does not matter
    np.testing.assert_allclose(similarity_shares(embeddings, far), shares, atol=1e-9)
