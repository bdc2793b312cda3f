"""Power laws over training steps and model sizes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from megatron_chameleon.mixture.scaling_laws import fit_power_laws

STEPS = np.array([1000.0, 2000.0, 4000.0, 7000.0, 10000.0])


def curves(count=6, exponent=0.55, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    constant, start = rng.uniform(1.5, 3, count), rng.uniform(100, 900, count)
    losses = constant[:, None] + (start[:, None] / STEPS) ** exponent
    return constant, start, losses + noise * rng.normal(size=losses.shape)


def test_the_laws_that_made_the_curves_are_found():
    constant, start, losses = curves()
    law = fit_power_laws(STEPS, losses)
    assert law.exponent == pytest.approx(0.55, abs=1e-4)
    np.testing.assert_allclose(law.constant, constant, atol=1e-3)
    np.testing.assert_allclose(law.predict(30000.0), constant + (start / 30000) ** 0.55, atol=1e-3)


def test_losses_ahead_are_predicted_in_spite_of_noise():
    constant, start, losses = curves(count=40, noise=0.003)
    ahead = fit_power_laws(STEPS, losses).predict(30000.0)
    assert np.abs(ahead - constant - (start / 30000) ** 0.55).mean() < 0.02
    assert np.abs(losses[:, -1] - constant - (start / 30000) ** 0.55).mean() > 0.05


def test_each_curve_has_the_least_squares_at_the_shared_exponent():
    """Beside a general solver of least squares that are not negative, curves that rise included."""
    constant, _, plain = curves()
    below = plain[:2] - constant[:2, None] - 0.05
    losses = np.concatenate([curves(noise=0.02)[2], plain[:2, ::-1], below])
    law = fit_power_laws(STEPS, losses)
    assert (law.constant[-2:] == 0).all()
    design = np.column_stack([np.ones(5), (STEPS / law.unit) ** -law.exponent])
    for row, curve in enumerate(losses):
        expected, _ = nnls(design, curve)
        np.testing.assert_allclose([law.constant[row], law.factor[row]], expected, atol=1e-8)


def test_the_exponent_is_the_best_of_many():
    losses = curves(noise=0.02)[2]
    law = fit_power_laws(STEPS, losses)

    def error(exponent):
        design = np.column_stack([np.ones(5), (STEPS / law.unit) ** -exponent])
        return sum(nnls(design, curve)[1] ** 2 for curve in losses)

    assert error(law.exponent) <= min(map(error, np.geomspace(0.02, 3, 500))) + 1e-12


def test_what_any_law_fits_is_refused():
    with pytest.raises(ValueError, match="2 points: a power law takes 3"):
        fit_power_laws(STEPS[:2], curves()[2][:, :2])
    for x in (STEPS[::-1], STEPS - 1000):
        with pytest.raises(ValueError, match="x must rise, from above 0"):
            fit_power_laws(x, curves()[2])
