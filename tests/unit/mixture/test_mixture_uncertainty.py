from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
    resampled_means_direct,
    uncertainty,
)
from tests.addresses import at_offset


def mean_shares(embeddings: np.ndarray) -> np.ndarray:
    """A plain weight function: the exponentials of the row means, normalised."""
    unnormalized = np.exp(embeddings.mean(axis=1))
    return unnormalized / unnormalized.sum()


def windows_of(counts: list[int], h: int = 6, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, h)) + rng.normal(size=h) for n in counts]


@pytest.mark.parametrize("block_values", [1, 200, 1 << 23])
def test_resamples_equal_the_plain_reference(monkeypatch, block_values):
    monkeypatch.setattr(uncertainty, "BLOCK_VALUES", block_values)
    windows = windows_of([40, 1, 7, 13])
    windows[2] = windows[2].astype(np.float32)
    result = bootstrap_weights(windows, mean_shares, num_resamples=25, seed=3)
    means = resampled_means_direct(windows, 25, seed=3)
    np.testing.assert_allclose(result.weights, [mean_shares(m) for m in means], rtol=1e-12)
    np.testing.assert_allclose(means[:, 1], np.tile(windows[1], (25, 1)))
    assert result.num_windows == (40, 1, 7, 13)


def test_intervals_are_percentiles_of_the_resamples():
    result = bootstrap_weights(windows_of([30, 20]), mean_shares, 400, seed=1, confidence=0.8)
    inside = (result.weights >= result.low) & (result.weights <= result.high)
    np.testing.assert_allclose(inside.mean(axis=0), 0.8, atol=0.01)
    assert (result.low < result.high).all()
    assert result.confidence == 0.8
    np.testing.assert_allclose(result.weights.sum(axis=1), 1.0)


def test_the_seed_decides_and_more_resamples_keep_the_first():
    windows = windows_of([30, 20, 10])
    first = bootstrap_weights(windows, mean_shares, 20, seed=5).weights
    np.testing.assert_array_equal(
        bootstrap_weights(windows, mean_shares, 20, seed=5).weights, first
    )
    longer = bootstrap_weights(windows, mean_shares, 50, seed=5).weights
    np.testing.assert_allclose(longer[:20], first, rtol=1e-13)
    assert np.abs(bootstrap_weights(windows, mean_shares, 20, seed=6).weights - first).max() > 1e-3


@pytest.mark.parametrize("offset", [8, 32])
def test_weights_are_the_same_wherever_the_vectors_lie(offset):
    """To the bit, or the same command would not write the same mixture twice."""
    windows = windows_of([40, 33, 7, 130], h=37)
    moved = [at_offset(vectors, offset) for vectors in windows]
    one, other = (
        bootstrap_weights(given, chameleon_weight_fn("pretrain", "scaled"), 10, seed=4)
        for given in (windows, moved)
    )
    np.testing.assert_array_equal(one.weights, other.weights)


def test_the_spread_of_the_means_is_the_standard_error():
    windows = windows_of([500], h=4)
    means = resampled_means_direct(windows, 4000, seed=0)[:, 0]
    np.testing.assert_allclose(means.mean(axis=0), windows[0].mean(axis=0), atol=0.005)
    expected = windows[0].std(axis=0) / np.sqrt(500)
    np.testing.assert_allclose(means.std(axis=0), expected, rtol=0.05)


def test_one_window_per_domain_gives_intervals_of_no_width():
    windows = windows_of([1, 1, 1])
    result = bootstrap_weights(windows, chameleon_weight_fn("pretrain"), 10)
    np.testing.assert_array_equal(result.low, result.high)
    plain = chameleon_weights(np.vstack(windows), "pretrain").weights
    np.testing.assert_allclose(result.low, plain)


def test_intervals_shrink_with_more_windows():
    widths = []
    for n in (50, 800):
        result = bootstrap_weights(
            windows_of([n] * 5, h=32), chameleon_weight_fn("finetune", "scaled"), 200
        )
        widths.append((result.high - result.low).mean())
    # Sixteen times the windows: about a quarter of the width.
    assert 0.15 < widths[1] / widths[0] < 0.4


@pytest.mark.parametrize(("mode", "recipe"), [("pretrain", "reference"), ("finetune", "scaled")])
def test_intervals_cover_the_weights_of_the_whole_population(mode, recipe):
    rng = np.random.default_rng(9)
    centers = rng.normal(size=(5, 16)) * 2
    truth = chameleon_weights(centers, mode, recipe).weights
    weight_fn = chameleon_weight_fn(mode, recipe)
    covered = []
    for trial in range(40):
        windows = [center + rng.normal(size=(120, 16)) for center in centers]
        result = bootstrap_weights(windows, weight_fn, 120, seed=trial, confidence=0.9)
        covered.append((result.low <= truth) & (truth <= result.high))
    assert 0.8 < np.mean(covered) < 0.97


def test_degenerate_resamples_are_counted_in_one_warning():
    windows = [np.zeros((3, 2)), np.zeros((5, 2))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bootstrap_weights(windows, chameleon_weight_fn("pretrain"), 12)
    assert [entry.category for entry in caught] == [DegenerateScoreWarning]
    assert "in 12 of 12 resamples" in str(caught[0].message)
    np.testing.assert_array_equal(result.weights, 0.5)


def test_other_warnings_pass_through():
    def weigh(embeddings: np.ndarray) -> np.ndarray:
        warnings.warn("of its own", RuntimeWarning, stacklevel=1)
        return mean_shares(embeddings)

    with pytest.warns(RuntimeWarning, match="of its own"):
        bootstrap_weights(windows_of([3, 3]), weigh, 2)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "window_vectors is empty: pass one array"),
        ([np.ones((2, 3)), np.ones((0, 3))], r"window_vectors\[1\] of shape \(0, 3\) is empty"),
        ([np.ones((2, 3)), np.ones((2, 4))], r"window_vectors\[1\] has 4 features but .* has 3"),
        ([np.ones(3)], r"window_vectors\[0\] must have 2 dimensions, one row per window"),
        ([np.ones((2, 1)), [[1.0], [np.nan]]], r"window_vectors\[1\] row 1 holds NaN"),
    ],
)
def test_bad_windows_are_refused(windows, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_weights(windows, mean_shares, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_resamples": 1}, "num_resamples is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"confidence": 95}, "confidence is 95"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_weights(windows_of([3, 3]), mean_shares, **{"num_resamples": 5, **arguments})


def test_a_weight_function_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"weight_fn gave shape \(\) for 2 domains"):
        bootstrap_weights(windows_of([3, 3]), lambda embeddings: embeddings.mean(), 5)
