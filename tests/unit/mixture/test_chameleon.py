"""Affinities, leverage scores and weights, compared with the paper's definitions and tables."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    affinity_matrix,
    chameleon_weights,
    leverage_scores,
)
from megatron_chameleon.mixture.affinity import center_embeddings, nearest_rows
from megatron_chameleon.mixture.leverage import feature_ridge_leverage
from megatron_chameleon.mixture.target import similarity_shares, target_prior

seeds = st.integers(0, 2**32 - 1)
recipes = st.sampled_from(sorted(RECIPES))
modes = st.sampled_from(["pretrain", "finetune"])


def random_embeddings(seed: int, k: int, h: int) -> np.ndarray:
    """Sample domains around a common mean, with a decaying spectrum like that of hidden states."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(k, h)) * np.arange(1, h + 1) ** -0.5 * 3 + rng.normal(size=h)


def scores_by_definition(affinity, ridge, prior=1.0):
    """Compute diag(K (K + k lambda diag(eta)^-1)^-1), as in the paper's appendix: plain
    reference."""
    k = len(affinity)
    return np.diagonal(affinity @ np.linalg.inv(affinity + k * ridge * np.eye(k) / prior))


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 15), st.integers(1, 15), st.floats(1e-4, 1e4), st.booleans())
def test_both_forms_of_the_scores_equal_the_definition(seed, k, h, ridge, center):
    embeddings = random_embeddings(seed, k, h)
    features = center_embeddings(embeddings) if center else embeddings
    affinity = affinity_matrix(embeddings, center)
    expected = scores_by_definition(affinity, ridge)
    np.testing.assert_allclose(leverage_scores(affinity, ridge), expected, atol=1e-9)
    np.testing.assert_allclose(feature_ridge_leverage(features, ridge), expected, atol=1e-9)


@pytest.mark.parametrize(
    "ridge", [sympy.Rational(10), sympy.Rational(1, 3), sympy.Rational(1, 10**6)]
)
@pytest.mark.parametrize("scale", [1, 1000])
def test_scores_equal_exact_rational_arithmetic(ridge, scale):
    # The five embeddings have rank 3, with a duplicate row and a zero row.
    embeddings = scale * np.array([[1, 2, 0], [1, 2, 0], [0, -1, 4], [3, 3, 1], [0, 0, 0]])
    affinity = embeddings @ embeddings.T
    exact = sympy.Matrix(affinity.tolist())
    exact *= (exact + 5 * ridge * sympy.eye(5)).inv()
    expected = np.array(exact.diagonal(), float)[0]
    tolerance = 1e-14 * max(1.0, affinity.max() / (5 * float(ridge)))
    for scores in (
        leverage_scores(affinity, float(ridge)),
        feature_ridge_leverage(embeddings, float(ridge)),
    ):
        np.testing.assert_allclose(scores, expected, atol=tolerance)
        assert scores[4] == 0.0


def double_centered(affinity: np.ndarray) -> np.ndarray:
    k = len(affinity)
    projector = np.eye(k) - np.ones((k, k)) / k
    return projector @ affinity @ projector


@settings(deadline=None, max_examples=30)
@given(seeds, st.integers(1, 12), st.integers(1, 20))
def test_centring_embeddings_double_centres_the_affinity(seed, k, h):
    embeddings = np.random.default_rng(seed).normal(size=(k, h))
    expected = double_centered(embeddings @ embeddings.T)
    centered = affinity_matrix(embeddings, center=True)
    np.testing.assert_allclose(centered, expected, atol=1e-12)
    np.testing.assert_allclose(centered.sum(axis=0), 0.0, atol=1e-11)
    np.testing.assert_array_equal(centered, centered.T)
    np.testing.assert_allclose(affinity_matrix(embeddings, False), embeddings @ embeddings.T)


def test_float32_embeddings_with_a_large_mean_keep_their_differences():
    rng = np.random.default_rng(0)
    embeddings = (rng.normal(size=(7, 256)) + 3000.0).astype(np.float32)
    exact = embeddings.astype(np.longdouble)
    exact -= exact.mean(axis=0)
    centered = affinity_matrix(embeddings, center=True)
    np.testing.assert_allclose(centered, (exact @ exact.T).astype(float), rtol=1e-9)
    # Centring the products of float32 embeddings instead loses the differences between domains.
    in_float32 = double_centered(embeddings @ embeddings.T)
    assert np.abs(in_float32 - centered).max() > 0.1 * np.abs(centered).max()


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_nearest_rows_have_the_largest_cosines(scale):
    features = np.random.default_rng(1).normal(size=(8, 5))
    norms = np.linalg.norm(features, axis=1)
    cosines = features @ features.T / np.outer(norms, norms)
    rows = np.array([6, 0, 3])
    positions, found = nearest_rows(scale * features, 3, rows)
    for i, nearest, near in zip(rows, positions, found, strict=True):
        others = sorted((j for j in range(8) if j != i), key=lambda j: -cosines[i, j])
        assert nearest.tolist() == others[:3]
        np.testing.assert_allclose(near, cosines[i, others[:3]])


# Weights printed in the paper's tables: SlimPajama, the Pile (these sum to 1.0171), and fine-tuning
# on Wiki40b and Stack.
SLIMPAJAMA = [0.083, 0.164, 0.202, 0.247, 0.082, 0.149, 0.073]
PILE = [0.0386, 0.0538, 0.0085, 0.0048, 0.0147, 0.0099, 0.0115, 0.0637, 0.0424]
PILE += [0.0226, 0.4519, 0.0104, 0.1207, 0.0226, 0.0123, 0.0212, 0.1075]
WIKI40B = [0.115, 0.163, 0.127, 0.109, 0.090, 0.140, 0.257]
STACK = [0.125, 0.129, 0.102, 0.088, 0.241, 0.118, 0.197]


def weigh(embeddings, mode, recipe, prior=None, **overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(embeddings, mode, recipe, prior=prior, **overrides)


def scores_behind(column: list[float], mode: str, temperature: float) -> np.ndarray:
    """Recover the normalised scores from a printed column of weights.

    A score is z = tau * ln(alpha) + c for finetuning and 1 / z for pretraining, where c makes the
    scores add up to 1.
    """
    z = temperature * np.log(np.array(column) / sum(column))
    if mode == "finetune":
        return z + (1 - z.sum()) / len(z)
    start = -z.min() + 1e-9
    return 1 / (z + brentq(lambda c: (1 / (z + c)).sum() - 1, start, start + 1e6))


def centred_domains_with_norms(squared_norms: np.ndarray, width: int) -> np.ndarray:
    """Find embeddings [k, width] with zero mean and the given squared norms, by alternation."""
    embeddings = np.random.default_rng(0).normal(size=(len(squared_norms), width))
    for _ in range(500):
        embeddings -= embeddings.mean(axis=0)
        embeddings *= np.sqrt(squared_norms / np.square(embeddings).sum(axis=1))[:, None]
    return embeddings


@pytest.mark.parametrize(
    ("column", "mode"),
    [(SLIMPAJAMA, "pretrain"), (PILE, "pretrain"), (WIKI40B, "finetune"), (STACK, "finetune")],
)
def test_reference_recipe_reproduces_the_papers_tables(column, mode):
    temperature = 5.0 if mode == "pretrain" else 0.2
    scores = scores_behind(column, mode, temperature)
    assert scores.min() > 0
    # Centred scores cannot exceed 1 - 1/k; the paper's scores are in a usual range around 1/k.
    assert scores.min() * len(column) > 0.35
    assert scores.max() * len(column) < 2.0
    # The embeddings are small compared with k * ridge, and have a common mean like hidden states.
    embeddings = centred_domains_with_norms(scores, 64) * 0.1 + 3.0
    weights = chameleon_weights(embeddings, mode, "reference").weights
    np.testing.assert_allclose(weights, np.array(column) / sum(column), atol=2e-3)


def test_scaled_recipe_equals_the_reference_with_seven_domains_and_equal_ridge():
    embeddings = np.random.default_rng(7).normal(size=(7, 256)) * 0.3 + 2.0
    for mode in ("pretrain", "finetune"):
        scaled = chameleon_weights(embeddings, mode, "scaled", score_floor=1e-10)
        reference = chameleon_weights(embeddings, mode, ridge=scaled.effective_ridge)
        np.testing.assert_allclose(scaled.weights, reference.weights, rtol=1e-12)
    eigenvalues = np.linalg.eigvalsh(affinity_matrix(embeddings, center=True))
    np.testing.assert_allclose(scaled.effective_ridge, 0.1 * eigenvalues.mean())


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_scaled_recipe_gives_three_thousand_domains_weights_that_are_not_one_hot(mode):
    rng = np.random.default_rng(11)
    spectrum, tails = np.arange(1, 129) ** -0.75, np.exp(rng.normal(size=(3000, 1)))
    weights = weigh(rng.normal(size=(3000, 128)) * spectrum * tails, mode, "scaled").weights
    assert 1.5 / 3000 < weights.max() < 0.02


@settings(deadline=None, max_examples=25)
@given(seeds, recipes, modes, st.floats(1e-6, 1e6))
def test_weights_do_not_depend_on_rotation_order_or_units(seed, recipe, mode, factor):
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(8, 10)) + rng.normal(size=10)
    rotation = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    order = rng.permutation(8)
    weights = weigh(embeddings, mode, recipe).weights
    rotated = weigh(embeddings @ rotation, mode, recipe).weights
    permuted = weigh(embeddings[order], mode, recipe).weights
    np.testing.assert_allclose(rotated, weights, atol=1e-9)
    np.testing.assert_allclose(permuted, weights[order], atol=1e-9)
    expected = weigh(embeddings, mode, "scaled").weights
    in_other_units = weigh(embeddings * factor, mode, "scaled").weights
    np.testing.assert_allclose(in_other_units, expected, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["reference", "scaled"])
def test_identical_domains_get_uniform_weights_and_a_warning(recipe):
    embeddings = np.tile(np.random.default_rng(0).normal(size=33) * 1e3, (6, 1))
    for mode in ("pretrain", "finetune"):
        with pytest.warns(DegenerateScoreWarning, match="position 0, 1, 2, 3, 4, 5"):
            result = chameleon_weights(embeddings, mode, recipe)
        np.testing.assert_array_equal(result.weights, np.full(6, 1 / 6))
        assert result.degenerate == (0, 1, 2, 3, 4, 5)


def problem(seed: int):
    """Sample embeddings [k, h] of any scale, and priors [k]."""
    rng = np.random.default_rng(seed)
    k, h = rng.integers(2, 9), rng.integers(1, 14)
    embeddings = rng.normal(size=(k, h)) * 10 ** rng.uniform(-1, 2) + rng.normal(size=h)
    return embeddings, rng.uniform(0.1, 3.0, k)


@given(seeds, recipes, modes)
def test_scores_and_weights_with_a_prior_follow_the_definition(seed, recipe, mode):
    embeddings, prior = problem(seed)
    result = weigh(embeddings, mode, recipe, prior, score_floor=1e-10, score_ceiling=np.inf)
    eta = prior / prior.mean()
    affinity = affinity_matrix(embeddings, result.recipe.center)
    expected = scores_by_definition(affinity, result.effective_ridge, eta)
    np.testing.assert_allclose(result.scores, expected, atol=1e-8)
    np.testing.assert_allclose(result.prior, eta, rtol=1e-12)
    shares = result.scores / result.scores.sum() if result.recipe.normalize else result.scores
    z = eta / shares if mode == "pretrain" else shares
    odds = np.exp((z - z.max()) / result.effective_temperature)
    np.testing.assert_allclose(result.weights, odds / odds.sum(), rtol=1e-7, atol=1e-9)


@given(seeds, recipes, modes, st.floats(1e-300, 1e300))
def test_equal_priors_give_bit_identical_weights(seed, recipe, mode, value):
    embeddings, _ = problem(seed)
    plain = weigh(embeddings, mode, recipe)
    same = weigh(embeddings, mode, recipe, np.full(len(embeddings), value))
    np.testing.assert_array_equal(same.weights, plain.weights)
    np.testing.assert_array_equal(same.scores, plain.scores)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0.01, 0.99))
def test_the_prior_is_a_weighted_mean_of_target_and_uniform(shares, strength):
    shares[0] = 1.0
    prior = target_prior(shares, strength)
    expected = 1 - strength + strength * len(shares) * np.array(shares) / np.sum(shares)
    np.testing.assert_allclose(prior, expected, rtol=1e-9)
    if len(set(shares)) == 1:
        assert (prior == 1).all()


def test_target_shares_are_squared_cosines_with_the_target():
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
    far = embeddings.mean(axis=0) + 50 * direction  # only the direction matters
    np.testing.assert_allclose(similarity_shares(embeddings, far), shares, atol=1e-9)
