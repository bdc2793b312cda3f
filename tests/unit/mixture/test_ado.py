"""ADO's rule: hand-computed updates, fits of known power laws, and which domain is preferred."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.mixture.ado import AdoState, ScalingLaws, fit_scaling_laws, preference
from megatron_chameleon.mixture.checks import Array

STEPS: Array = 8 * np.arange(100, 4000, 50, dtype=np.float64)


def losses_of(laws: ScalingLaws, samples: Array) -> Array:
    losses: Array = laws.irreducible + laws.scale * samples[:, None] ** -laws.exponent
    return losses


def test_updates_by_hand():
    prior, speed = np.array([0.75, 0.25]), np.array([1.0, 4.0])
    laws = ScalingLaws(np.array([2.0, 0.0]), np.array([6.0, 8.0]), np.array([0.5, 0.25]))
    np.testing.assert_allclose(laws.learning_speed(16.0), [0.5 * 1.5 / 16, 0.25 * 4 / 16])
    # mu h^s speed = 0.2 * 0.8 * 1, 0.5 * 0.4 * 2 and 0.3 * 0.2^0.5 * 3
    preferred = preference(
        np.array([0.2, 0.5, 0.3]), np.array([0.64, 0.16, 0.2]), np.array([1.0, 2, 3]), 0.01
    )
    expected = np.array([0.16, 0.4, 0.9 * 0.2**0.5])
    np.testing.assert_allclose(preferred, expected / expected.sum())
    # 0.75 * 0.6 * 1 and 0.25 * 0.8 * 4
    preferred = preference(prior, np.array([0.36, 0.64]), speed, 0.01)
    np.testing.assert_allclose(preferred, np.array([0.45, 0.8]) / 1.25)
    # A domain with all of the credit keeps its preference.
    alone = preference(np.array([0.5, 0.5]), np.array([1.0, 0.0]), speed, 0.01)
    np.testing.assert_allclose(alone, np.array([1.0, 0.01]) / 1.01)
    np.testing.assert_allclose(preference(prior, prior, np.array([0.0, 1.0]), 0.01)[0], 0.01 / 1.01)
    np.testing.assert_allclose(preference(prior, prior, np.zeros(2), 0.01), prior)
    # With the same preference, one update after two steps equals two updates.
    first = AdoState.first(prior)
    once = first.updated(2, preferred, 0.9)
    twice = first.updated(1, preferred, 0.9).updated(2, preferred, 0.9)
    np.testing.assert_allclose(once.average, prior / 3 + 2 * preferred / 3)
    np.testing.assert_allclose(twice.average, once.average)
    np.testing.assert_allclose(once.policy, 0.9 * prior + 0.1 * preferred)
    np.testing.assert_allclose(
        once.credit_at(4), once.policy + 0.81 * (prior - once.policy)
    )  # h is the prior at step 2, and two more steps sample the policy


def test_fits_recover_known_laws_and_ignore_missing_losses():
    laws = ScalingLaws(
        np.array([1.7, 2.5, 0.0, 3.0]), np.array([9.0, 30, 6, 0]), np.array([0.31, 0.62, 0.1, 0.5])
    )
    losses, tokens = losses_of(laws, STEPS), np.full((len(STEPS), 4), 64.0)
    losses[::3, 1], tokens[::3, 1] = np.nan, 0
    found = fit_scaling_laws(STEPS, losses, tokens)
    np.testing.assert_allclose(found.exponent[:3], laws.exponent[:3], atol=6e-3)
    np.testing.assert_allclose(losses_of(found, STEPS), losses_of(laws, STEPS), rtol=2e-3)
    np.testing.assert_allclose(
        found.learning_speed(STEPS[-1]), laws.learning_speed(STEPS[-1]), 0.01
    )
    rising = fit_scaling_laws(STEPS, losses[::-1, :1], tokens[:, :1])
    assert rising.learning_speed(STEPS[-1]) == 0


def test_of_two_domains_the_faster_learner_gets_more():
    """Both domains have the same loss at the last step, but domain 1 falls twice as fast."""
    laws = ScalingLaws(np.array([2.0, 2.0]), np.array([2.0, 2.0]), np.array([0.2, 0.4]))
    laws = ScalingLaws(laws.irreducible, STEPS[-1] ** laws.exponent, laws.exponent)
    losses = losses_of(laws, STEPS)
    losses *= 1 + 0.02 * np.random.default_rng(0).standard_normal(losses.shape)
    prior, state = np.array([0.5, 0.5]), AdoState.first(np.array([0.5, 0.5]))
    for count in range(10, len(STEPS) + 1):
        fitted = fit_scaling_laws(STEPS[:count], losses[:count], np.ones((count, 2)))
        speed = fitted.learning_speed(STEPS[count - 1])
        step = int(STEPS[count - 1] / 8)
        preferred = preference(prior, state.credit_at(step), speed, 0.01)
        state = state.updated(step, preferred, 0.9)
    assert state.policy[1] > 0.6
