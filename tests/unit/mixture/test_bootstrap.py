"""The bootstrap over windows, compared with a simple implementation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_chameleon.mixture import bootstrap, bootstrap_weights, chameleon_weights
from megatron_chameleon.mixture.bootstrap import (
    MAX_VALUES,
    group_size,
    grouped_windows,
    outweighing_probability,
)
from megatron_chameleon.mixture.weights import DegenerateScoreWarning
from tests.addresses import at_offset


def mean_shares(embeddings: np.ndarray) -> np.ndarray:
    """Simple weight function: softmax of the row means."""
    unnormalized = np.exp(embeddings.mean(axis=1))
    return unnormalized / unnormalized.sum()


def windows_of(counts: list[int], h: int = 6, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, h)) + rng.normal(size=h) for n in counts]


@pytest.mark.parametrize("block_values", [1, 200, 1 << 23])
def test_resamples_equal_the_plain_reference(monkeypatch, block_values):
    monkeypatch.setattr(bootstrap, "BLOCK_VALUES", block_values)
    windows = windows_of([40, 1, 7, 13])
    windows[2] = windows[2].astype(np.float32)
    result = bootstrap_weights(windows, mean_shares, 25, seed=3, confidence=0.8)
    means = np.empty((25, 4, 6))
    for domain, vectors in enumerate(windows):
        generator = np.random.default_rng([3, domain])
        for resample in range(25):
            sampled = generator.integers(len(vectors), size=len(vectors))
            means[resample, domain] = vectors[sampled].mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(result.weights, [mean_shares(m) for m in means], rtol=1e-12)
    np.testing.assert_allclose(means[:, 1], np.tile(windows[1], (25, 1)))
    low, high = np.quantile(result.weights, [0.1, 0.9], axis=0)
    np.testing.assert_allclose([result.low, result.high], [low, high], rtol=1e-12)
    first, second = result.weights[:, 0], result.weights[:, 2]
    assert outweighing_probability(result, [0], [2]) == (first > second).mean()
    more = bootstrap_weights(windows, mean_shares, num_resamples=30, seed=3)
    np.testing.assert_allclose(more.weights[:25], result.weights, rtol=1e-12)


def test_the_warning_counts_the_resamples_with_clipped_scores():
    def weigh(embeddings):
        for _ in range(3):
            warnings.warn("clipped", DegenerateScoreWarning, stacklevel=1)
        return mean_shares(embeddings)

    with pytest.warns(DegenerateScoreWarning, match="10 of 10 resamples"):
        bootstrap_weights(windows_of([4, 5]), weigh, 10)


def pretraining_weights(embeddings):
    return chameleon_weights(embeddings, "pretrain").weights


def scaled_weights(embeddings):
    return chameleon_weights(embeddings, "pretrain", "scaled").weights


@pytest.mark.parametrize("offset", [8, 32])
def test_weights_do_not_depend_on_memory_alignment(offset):
    """Weights must be bit-identical, so that a repeated command writes the same mixture."""
    windows = windows_of([40, 33, 7, 130], h=37)
    moved = [at_offset(vectors, offset) for vectors in windows]
    one, other = (
        bootstrap_weights(vectors, scaled_weights, 10, seed=4) for vectors in (windows, moved)
    )
    np.testing.assert_array_equal(one.weights, other.weights)


def test_intervals_cover_the_weights_of_the_whole_population():
    rng = np.random.default_rng(9)
    centers = rng.normal(size=(5, 16)) * 2
    truth = chameleon_weights(centers, "pretrain").weights
    covered = []
    for trial in range(30):
        windows = [center + rng.normal(size=(120, 16)) for center in centers]
        result = bootstrap_weights(windows, pretraining_weights, 120, seed=trial, confidence=0.9)
        covered.append((result.low <= truth) & (truth <= result.high))
    assert 0.8 < np.mean(covered) < 0.97


def test_each_window_is_in_one_group_and_grouping_keeps_the_mean():
    size = group_size(1000, 4096, 768)
    assert size > 1
    assert 1000 * (4096 // size) * 768 <= MAX_VALUES
    vectors = (np.random.default_rng(1).normal(size=(100, 5)) + 10).astype(np.float32)
    groups = grouped_windows(vectors, 3, seed=2)
    assert groups.shape == (33, 5)
    assert groups.dtype == np.float32
    mean, expected = (array.mean(axis=0, dtype=np.float64) for array in (groups, vectors))
    rounding = np.finfo(np.float32).eps * np.abs(groups).max()  # rounding error of a group's mean
    np.testing.assert_allclose(mean, expected, rtol=0, atol=rounding)
    order = np.random.default_rng([2, 100]).permutation(100)[:99].reshape(33, 3)
    plain = np.stack([vectors[rows].mean(axis=0) for rows in order])
    shift = vectors.mean(axis=0) - plain.mean(axis=0)
    np.testing.assert_allclose(groups, plain + shift, rtol=1e-5)
