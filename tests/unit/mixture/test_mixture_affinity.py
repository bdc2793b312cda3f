from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.mixture import affinity_matrix, center_embeddings

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


def test_uncentred_is_the_plain_inner_product():
    embeddings = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 4.0]])
    expected = [[5.0, 1.0, 8.0], [1.0, 10.0, -4.0], [8.0, -4.0, 16.0]]
    np.testing.assert_array_equal(affinity_matrix(embeddings, center=False), expected)


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


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1, -7.7e-9])
def test_identical_domains_are_centred_to_exactly_zero(value):
    embeddings = np.full((11, 5), value) * np.linspace(0.3, 2.9, 5)
    assert not center_embeddings(embeddings).any()
    assert not affinity_matrix(embeddings, center=True).any()


def test_centring_keeps_differences_just_above_the_resolution():
    step = 16 * np.finfo(np.float64).eps
    embeddings = np.array([[1.0], [1.0 + step]])
    np.testing.assert_allclose(center_embeddings(embeddings), [[-step / 2], [step / 2]], rtol=0.1)


def test_the_input_is_not_changed():
    embeddings = np.random.default_rng(0).normal(size=(4, 3))
    before = embeddings.copy()
    affinity_matrix(embeddings, center=True)
    np.testing.assert_array_equal(embeddings, before)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (np.zeros(3), r"embeddings must have 2 dimensions.*shape \(3,\): reshape"),
        (np.zeros((2, 3, 4)), r"embeddings must have 2 dimensions.*\(2, 3, 4\)"),
        (np.zeros((0, 4)), r"embeddings of shape \(0, 4\) is empty: pass at least one domain"),
        (np.zeros((4, 0)), r"embeddings of shape \(4, 0\) is empty"),
        ([[1.0, 2.0], [3.0, np.nan]], "embeddings row 1 holds NaN or infinity: recompute"),
        ([[np.inf, 2.0], [3.0, 1.0]], "embeddings row 0 holds NaN or infinity"),
        ([[1e200, 0.0], [1.0, 0.0]], "too large for their inner products: divide"),
    ],
)
@pytest.mark.parametrize("center", [True, False])
def test_bad_embeddings_are_refused(embeddings, message, center):
    with pytest.raises(ValueError, match=message) as caught:
        affinity_matrix(embeddings, center)
    assert "\n" not in str(caught.value)
