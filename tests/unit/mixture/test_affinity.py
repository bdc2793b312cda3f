"""Affinity of domains: inner products and cosines, next to plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.mixture import (
    affinity,
    affinity_matrix,
    nearest_rows,
)

seeds = st.integers(0, 2**32 - 1)


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
    # What this avoids: float32 products, centred afterwards.
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
