"""Weights from leverage scores and from sizes, and mixtures under constraints."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_chameleon.mixture import DegenerateScoreWarning, domain_weights
from megatron_chameleon.mixture.weights import capped_weights, natural_weights, placed_weights

any_scores = hnp.arrays(
    np.float64, st.integers(1, 40), elements=st.floats(0.0, 1.0, allow_subnormal=True)
)
modes = st.sampled_from(["pretrain", "finetune"])


@settings(deadline=None, max_examples=200)
@given(any_scores, modes, st.floats(1e-6, 1e6), st.booleans())
@example(np.array([5e-324, 0.0]), "pretrain", 1.0, True)
def test_weights_always_lie_on_the_simplex(scores, mode, temperature, normalize):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy must not warn of overflow or invalid values
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        weights = domain_weights(scores, mode, temperature, normalize)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)
    order = np.argsort(scores if mode == "finetune" else -scores, kind="stable")
    assert (np.diff(weights[order]) >= -1e-15).all()


@pytest.mark.parametrize("at_the_mean", [0.0, 1e-18, -1e-18, 5e-324])
def test_a_domain_at_the_mean_gets_the_limiting_weight_and_a_warning(at_the_mean):
    scores = [0.5, at_the_mean, 0.3]
    with pytest.warns(DegenerateScoreWarning, match="position 1"):
        weights = domain_weights(scores, "pretrain", 5.0, True)
    np.testing.assert_allclose(weights, [0, 1, 0], atol=1e-12)


def test_score_limits_bound_the_ratio_of_two_weights():
    scores = np.array([1e-6, 1.0, 1.0, 1.0, 100.0])
    floor, ceiling = 0.02 * scores.mean(), 3.0 * scores.mean()
    limits: dict[str, Any] = {"score_floor": 0.02, "score_ceiling": 3.0}
    # Fine-tuning has no lower limit, so the warning must not name position 0.
    with pytest.warns(DegenerateScoreWarning, match="position 4"):
        weights = domain_weights(scores, "finetune", 7.0, False, **limits)
    np.testing.assert_allclose(weights[4] / weights[0], np.exp((ceiling - 1e-6) / 7.0))
    with pytest.warns(DegenerateScoreWarning, match="position 0, 4"):
        weights = domain_weights(scores, "pretrain", 0.5, False, **limits)
    np.testing.assert_allclose(weights[0] / weights[4], np.exp((1 / floor - 1 / ceiling) / 0.5))


def test_new_domains_keep_their_weights_and_old_domains_their_ratios():
    placed = placed_weights([0.4, 0.3, 0.2, 0.1], [0.75, 9.0, 0.25, 9.0], [1, 0, 1, 0])
    np.testing.assert_allclose(placed, [0.45, 0.3, 0.15, 0.1])


@pytest.mark.parametrize("seed", range(6))
def test_capped_weights_minimize_the_divergence(seed):
    """Check the Karush-Kuhn-Tucker conditions, which are sufficient for this convex problem."""
    generator = np.random.default_rng(seed)
    target = generator.dirichlet(np.ones(6))
    caps = generator.dirichlet(np.ones(6)) * generator.uniform(1.05, 3)
    found = capped_weights(target, caps)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found <= caps).all()
    ratios, is_capped = found / target, found == caps
    assert is_capped.any()
    np.testing.assert_allclose(ratios[~is_capped], ratios.max())
    assert (ratios[is_capped] <= ratios.max() * (1 + 1e-12)).all()


@pytest.mark.parametrize("k", [2, 7, 59])
def test_caps_that_sum_to_one_up_to_rounding_are_accepted(k):
    """Caps sum to 1 up to rounding if the token budget equals all of the text."""
    caps = np.ones(k) * (1.0 / k) * (1 - 1e-15)
    found = capped_weights(np.full(k, 1 / k), caps)
    np.testing.assert_allclose(found, caps, rtol=1e-12)
    with pytest.raises(ValueError, match="less than 1"):
        capped_weights(np.full(k, 1 / k), caps * (1 - 1e-9))


@given(
    st.lists(st.integers(1, 10**15), min_size=1, max_size=20),
    st.floats(1e-300, 1e300, allow_subnormal=False),
)
def test_natural_weights_are_proportional_to_sizes_to_the_inverse_temperature(tokens, temperature):
    np.testing.assert_allclose(natural_weights([1, 4, 0, 9], 2.0), np.array([1, 2, 0, 3]) / 6)
    weights = natural_weights(tokens, temperature)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    order = np.argsort(tokens, kind="stable")
    assert (np.diff(weights[order]) >= 0).all()
