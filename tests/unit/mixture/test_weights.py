"""Weights from leverage scores."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_chameleon.mixture import DegenerateScoreWarning, domain_weights, placed_weights

any_scores = hnp.arrays(
    np.float64, st.integers(1, 40), elements=st.floats(0.0, 1.0, allow_subnormal=True)
)
modes = st.sampled_from(["pretrain", "finetune"])


@settings(deadline=None, max_examples=200)
@given(any_scores, modes, st.floats(1e-6, 1e6), st.booleans())
@example(np.array([5e-324, 0.0]), "pretrain", 1.0, True)
def test_weights_always_lie_on_the_simplex(scores, mode, temperature, normalize):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a RuntimeWarning of numpy fails the test
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        weights = domain_weights(scores, mode, temperature, normalize)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)
    order = np.argsort(scores if mode == "finetune" else -scores, kind="stable")
    assert (np.diff(weights[order]) >= -1e-15).all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("at_the_mean", [0.0, 1e-18, -1e-18, 5e-324])
def test_a_domain_at_the_mean_warns_and_takes_the_limit(normalize, at_the_mean):
    scores = [0.5, at_the_mean, 0.3]
    with pytest.warns(DegenerateScoreWarning, match="position 1"):
        weights = domain_weights(scores, "pretrain", 5.0, normalize)
    np.testing.assert_allclose(weights, [0, 1, 0], atol=1e-12)


def test_score_limits_bound_the_odds():
    scores = np.array([1e-6, 1.0, 1.0, 1.0, 100.0])
    floor, ceiling = 0.02 * scores.mean(), 3.0 * scores.mean()
    limits: dict[str, Any] = {"score_floor": 0.02, "score_ceiling": 3.0}
    # Fine-tuning has no floor: position 0 is not named.
    with pytest.warns(DegenerateScoreWarning, match="position 4"):
        weights = domain_weights(scores, "finetune", 7.0, False, **limits)
    np.testing.assert_allclose(weights[4] / weights[0], np.exp((ceiling - 1e-6) / 7.0))
    with pytest.warns(DegenerateScoreWarning, match="position 0, 4"):
        weights = domain_weights(scores, "pretrain", 0.5, False, **limits)
    np.testing.assert_allclose(weights[0] / weights[4], np.exp((1 / floor - 1 / ceiling) / 0.5))
    with pytest.warns(DegenerateScoreWarning):
        weights = domain_weights(scores, "pretrain", 2.0, True, **limits)
    shares = np.array([floor, 1.0, 1.0, 1.0, ceiling]) / scores.sum()
    expected = np.exp(1 / shares / 2.0 - 1 / shares[0] / 2.0)
    np.testing.assert_allclose(weights, expected / expected.sum())


def test_new_domains_have_their_share_and_old_ones_their_ratios():
    placed = placed_weights([0.4, 0.3, 0.2, 0.1], [0.75, 9.0, 0.25, 9.0], [1, 0, 1, 0])
    np.testing.assert_allclose(placed, [0.45, 0.3, 0.15, 0.1])
