"""Affinities and leverage scores, compared with plain formulas and exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.mixture import affinity, affinity_matrix, leverage_scores
from megatron_chameleon.mixture.affinity import center_embeddings, nearest_rows
from megatron_chameleon.mixture.leverage import feature_ridge_leverage, leverage_scores_direct

seeds = st.integers(0, 2**32 - 1)
ridges = st.floats(1e-4, 1e4)


def random_embeddings(seed: int, k: int, h: int) -> np.ndarray:
    """Domains around a common mean, with a decaying spectrum as hidden states have."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(k, h)) * np.arange(1, h + 1) ** -0.5 * 3 + rng.normal(size=h)


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 15), st.integers(1, 15), ridges, st.booleans())
def test_both_forms_equal_the_direct_formula(seed, k, h, ridge, center):
    embeddings = random_embeddings(seed, k, h)
    features = center_embeddings(embeddings) if center else embeddings
    affinity = affinity_matrix(embeddings, center)
    expected = leverage_scores_direct(affinity, ridge)
    np.testing.assert_allclose(leverage_scores(affinity, ridge), expected, atol=1e-9)
    np.testing.assert_allclose(feature_ridge_leverage(features, ridge), expected, atol=1e-9)


@pytest.mark.parametrize(
    "ridge", [sympy.Rational(10), sympy.Rational(1, 3), sympy.Rational(1, 10**6)]
)
@pytest.mark.parametrize("scale", [1, 1000])
def test_scores_equal_exact_rational_arithmetic(ridge, scale):
    # Rank 3 of 5, with a duplicate and a zero row.
    embeddings = scale * np.array([[1, 2, 0], [1, 2, 0], [0, -1, 4], [3, 3, 1], [0, 0, 0]])
    affinity = embeddings @ embeddings.T
    exact = sympy.Matrix(affinity.tolist())
    exact *= (exact + 5 * ridge * sympy.eye(5)).inv()
    expected = np.array(exact.diagonal(), float)[0]
    tolerance = 1e-14 * max(1.0, affinity.max() / (5 * float(ridge)))
    for scores in (
        leverage_scores(affinity, float(ridge)),
        leverage_scores_direct(affinity, float(ridge)),
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
def test_centring_the_embeddings_is_double_centring_the_affinity(seed, k, h):
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
    # Centring after float32 products would lose the differences.
    in_float32 = double_centered(embeddings @ embeddings.T)
    assert np.abs(in_float32 - centered).max() > 0.1 * np.abs(centered).max()


@pytest.mark.parametrize(("block", "scale"), [(1, 1e-200), (3, 1.0), (1024, 1e200)])
def test_the_nearest_are_those_of_the_largest_cosines(monkeypatch, block, scale):
    monkeypatch.setattr(affinity, "BLOCK_ROWS", block)
    features = np.random.default_rng(1).normal(size=(8, 5))
    norms = np.linalg.norm(features, axis=1)
    cosines = features @ features.T / np.outer(norms, norms)
    positions, found = nearest_rows(scale * features, 3)
    for i in range(8):
        others = sorted((j for j in range(8) if j != i), key=lambda j: -cosines[i, j])
        assert positions[i].tolist() == others[:3]
        np.testing.assert_allclose(found[i], cosines[i, others[:3]])
