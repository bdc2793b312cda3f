"""Test limits on the samples of a schedule against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.blend.order import MAX_SURPLUS, BlendOrder
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase


def limited_by_a_loop(shares: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Cap domains one round at a time; raise the others in proportion to ``shares`` [k]."""
    found = shares.copy()
    while (over := found > most * (1 + 1e-12)).any():
        found[over] = most[over]
        free = (found < most) & (shares > 0)
        found[free] += (1 - found.sum()) * found[free] / found[free].sum()
    return found


@pytest.mark.parametrize("seed", range(30))
def test_limited_counts_are_those_of_a_loop_and_within_the_caps(seed):
    rng = np.random.default_rng(seed)
    k, starts, num_samples = 5, (0, 400, 1000), 2000
    phases = tuple(Phase(start, tuple(rng.gamma(0.7, size=k))) for start in starts[: 1 + seed % 3])
    schedule = MixtureSchedule((*phases, Phase(9999, (1.0,) * k)))
    targets = np.array(schedule.target_samples(num_samples))
    caps = np.where(rng.random(k) < 0.5, targets * rng.uniform(0.3, 1.2, k), np.inf)
    caps[rng.integers(k)] = np.inf
    limited = schedule.limited(caps.tolist(), num_samples)
    expected = np.zeros(k)
    for (phase, length), (new, _) in zip(
        schedule.spans(num_samples), limited.spans(num_samples), strict=True
    ):
        planned = phase.shares * length
        samples = limited_by_a_loop(planned / length, caps * planned / targets / length) * length
        np.testing.assert_allclose(new.shares * length, samples, rtol=1e-9)
        expected += samples
    np.testing.assert_allclose(limited.target_samples(num_samples), expected, rtol=1e-9)
    assert (expected <= caps * (1 + 1e-9)).all()
    assert limited.phases[-1] == schedule.phases[-1]
    # The actual order exceeds the caps by less than the surplus that limit_repetition reserves.
    before, done = np.zeros(k), np.zeros(k, np.int64)
    for phase, length in limited.spans(num_samples):
        done += BlendOrder(phase.weights, (before - done).tolist()).counts(length)
        before += phase.shares * length
    assert (done <= caps + MAX_SURPLUS).all()
    if (targets <= caps).all():
        assert limited is schedule


def test_a_phase_that_its_domains_cannot_fill_is_an_error():
    schedule = MixtureSchedule((Phase(0, (0.5, 0.5)), Phase(50, (1.0, 0.0))))
    with pytest.raises(ValueError, match="less than 1"):
        schedule.limited([60.0, np.inf], 100)
    assert schedule.limited([60.0, np.inf], 50) is schedule
    assert MixtureSchedule.fixed((2.0, 2.0, 0.0)).limited([20, 90, 0], 100).phases == (
        Phase(0, (0.2, 0.8, 0.0)),
    )
