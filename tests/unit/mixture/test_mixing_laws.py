"""Mixing laws: fit, optimum, power laws over steps and sizes, published losses."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize, nnls

from megatron_chameleon.mixture.fit_quality import folds_of, held_out_predictions, quality_of
from megatron_chameleon.mixture.mixing_laws import (
    LawSettings,
    MixingLaws,
    fit_mixing_laws,
    fit_power_laws,
    law_optimum,
    penalised_huber,
    simplex_grid,
)
from tests.unit.mixture.public_results import public_results

TRUE = MixingLaws(
    constant=np.array([2.0, 1.5]),
    scale=np.array([0.9, 1.4]),
    exponents=np.array([[-3.0, 0.5, -0.5], [0.4, -4.0, -1.0]]),
)


def runs(count=24, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet(np.ones(3), count)
    losses = TRUE.predict(mixtures)
    return mixtures, losses + noise * rng.normal(size=losses.shape)


def objective_plainly(parameters, mixtures, losses, settings):
    """Compute the objective with the textbook definition of the Huber loss, one run at a time."""
    total, delta = 0.0, settings.huber_delta
    for weights, loss in zip(mixtures, losses, strict=True):
        exponent = sum(w * t for w, t in zip(weights, parameters[2:], strict=True))
        residual = np.exp(parameters[0]) + np.exp(parameters[1]) * np.exp(exponent) - loss
        if abs(residual) <= delta:
            total += residual**2 / 2
        else:
            total += delta * (abs(residual) - delta / 2)
    ridge = settings.ridge * sum(t**2 for t in parameters[2:])
    return total / len(losses) / delta**2 + ridge


def test_the_objective_is_the_penalised_mean_huber_loss_and_has_its_gradient():
    settings = LawSettings(huber_delta=0.3, ridge=0.02)
    mixtures, losses = runs(noise=0.3)
    parameters = np.random.default_rng(1).normal(0, 0.5, (6, 5))
    targets = np.tile(losses.T, (3, 1))
    values, gradients, _ = penalised_huber(parameters, mixtures, targets, settings)
    for row, target, value, gradient in zip(parameters, targets, values, gradients, strict=True):

        def plainly(point, target=target):
            return objective_plainly(point, mixtures, target, settings)

        assert value == pytest.approx(plainly(row), rel=1e-12)
        np.testing.assert_allclose(
            gradient, approx_fprime(row, plainly, 1e-7), rtol=2e-4, atol=2e-4
        )


def best_of_separate_descents(mixtures, losses, settings, starts=8):
    """Minimum of the objective over L-BFGS descents, one after the other, from random points."""
    rng, size, found = np.random.default_rng(0), mixtures.shape[1] + 2, []
    bounds = [(-20, np.log(losses.max())), (-20, 10), *[(-50, 50)] * (size - 2)]

    def objective(point):
        value, gradient, _ = penalised_huber(point[None], mixtures, losses[None], settings)
        return value[0], gradient[0]

    for _ in range(starts):
        start = np.concatenate(
            [[np.log(rng.uniform(0.1, 0.95) * losses.min()), 0], np.zeros(size - 2)]
        )
        start[1:] += rng.normal(0, 1, size - 1)
        run = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds)
        found.append(run.fun)
    return min(found)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_batched_fits_reach_the_optimum_of_separate_descents(ridge):
    """Laws of losses with outliers, and a loss that falls to 0 where no constant helps."""
    settings, (mixtures, losses) = LawSettings(ridge=ridge), runs(noise=0.02)
    losses[[3, 8], 0] += 0.8
    losses = np.column_stack([losses, 3 * np.exp(-3 * mixtures[:, 0])])
    laws = fit_mixing_laws(mixtures, losses, settings)
    parameters = np.column_stack([np.log(laws.constant), np.log(laws.scale), laws.exponents])
    reached, gradients, _ = penalised_huber(parameters, mixtures, losses.T, settings)
    assert np.abs(gradients).max() < 1e-3
    for value, column in zip(reached, losses.T, strict=True):
        assert value <= best_of_separate_descents(mixtures, column, settings) * (1 + 1e-6) + 1e-6


def test_fit_recovers_the_laws_that_generated_the_losses():
    mixtures, losses = runs()
    found = fit_mixing_laws(mixtures, losses, LawSettings(ridge=0.0))
    others, expected = runs(seed=9)
    np.testing.assert_allclose(found.predict(others), expected, atol=2e-3)
    # Weights sum to 1, so the factor k can compensate a shift of all exponents t.
    shifts = found.exponents - TRUE.exponents
    np.testing.assert_allclose(shifts, np.tile(shifts[:, [0]], (1, 3)), atol=0.15)
    np.testing.assert_allclose(found.constant, TRUE.constant, atol=0.05)


def test_cross_validation_exposes_a_fit_to_noise():
    """Held-out predictions of laws with as many unknowns as runs and no ridge must be poor, even
    if each fit starts from the fit to all runs, which has seen the held-out runs."""
    rng = np.random.default_rng(80)
    mixtures = rng.dirichlet(np.full(8, 0.4), 10)
    losses = 3 + rng.normal(0, 0.1, (10, 1))
    settings = LawSettings(ridge=0.0)
    laws = fit_mixing_laws(mixtures, losses, settings)
    held_out = held_out_predictions(
        lambda x, y: fit_mixing_laws(x, y, settings, near=laws).predict,
        mixtures,
        losses,
        folds_of(10, 10, 0),
    )
    quality = quality_of(held_out, losses)
    assert quality.mae[0] > 2 * quality.spread[0]


def test_published_losses_of_five_domains_are_predicted():
    """Fit 20 mixtures of the study, and predict the mean loss of the 6 others.

    Over many splits the mean absolute error is 0.020, with a standard deviation of 0.006 between
    splits: the mean over eight seeded splits is within 0.002 of it. A constant prediction has an
        error of 0.064.
    """
    (path,) = public_results("mixing_laws").glob("five_domains_70m_*.csv")
    data = np.loadtxt(path, delimiter=",", skiprows=1)
    mixtures, losses = data[:, :5], data[:, 5:]
    errors, correlations, constant = [], [], []
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(26)
        fitted, held_out = order[:20], order[20:]
        laws = fit_mixing_laws(mixtures[fitted], losses[fitted], LawSettings())
        predicted = laws.predict(mixtures[held_out])
        mean = losses.mean(axis=1)
        errors.append(np.abs(predicted.mean(axis=1) - mean[held_out]).mean())
        constant.append(np.abs(mean[fitted].mean() - mean[held_out]).mean())
        correlations.append(quality_of(predicted, losses[held_out]).spearman.mean())
    assert np.mean(errors) <= 0.022
    assert np.mean(errors) < 0.4 * np.mean(constant)
    assert np.mean(correlations) > 0.8


STEPS = np.array([1000.0, 2000.0, 4000.0, 7000.0, 10000.0])


def curves(count=6, exponent=0.55, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    constant, start = rng.uniform(1.5, 3, count), rng.uniform(100, 900, count)
    losses = constant[:, None] + (start[:, None] / STEPS) ** exponent
    return constant, start, losses + noise * rng.normal(size=losses.shape)


def test_power_laws_are_least_squares_fits_with_a_shared_exponent():
    """Compare with a general solver of non-negative least squares, also for rising curves."""
    constant, start, plain = curves()
    law = fit_power_laws(STEPS, plain)
    assert law.exponent == pytest.approx(0.55, abs=1e-4)
    np.testing.assert_allclose(law.predict(30000.0), constant + (start / 30000) ** 0.55, atol=1e-3)
    below = plain[:2] - constant[:2, None] - 0.05
    losses = np.concatenate([curves(noise=0.02)[2], plain[:2, ::-1], below])
    law = fit_power_laws(STEPS, losses)
    assert (law.constant[-2:] == 0).all()
    design = np.column_stack([np.ones(5), (STEPS / law.unit) ** -law.exponent])
    for row, curve in enumerate(losses):
        expected, _ = nnls(design, curve)
        np.testing.assert_allclose([law.constant[row], law.factor[row]], expected, atol=1e-8)


def random_laws(rng, num_losses, num_domains):
    return MixingLaws(
        constant=rng.uniform(1, 3, num_losses),
        scale=rng.uniform(0.2, 1.5, num_losses),
        exponents=rng.normal(0, 3, (num_losses, num_domains)),
    )


def test_the_optimum_is_found_if_no_grid_point_lies_within_the_bounds():
    laws, shares = random_laws(np.random.default_rng(0), 2, 40), np.array([1.0, 0.0])
    low, high, start = np.full(40, 0.02), np.full(40, 0.04), np.full(40, 1 / 40)
    found = law_optimum(laws, shares, low, high, start)
    assert found.weights.sum() == pytest.approx(1)
    assert (found.weights >= low - 1e-9).all()
    assert (found.weights <= high + 1e-9).all()
    assert found.predicted < laws.predict(start[None])[0] @ shares


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_below_every_point_of_a_fine_grid(seed):
    rng = np.random.default_rng(seed)
    laws, shares = random_laws(rng, 4, 3), rng.dirichlet(np.ones(4))
    found = law_optimum(laws, shares, np.zeros(3), np.ones(3), start=np.full(3, 1 / 3))
    grid = np.concatenate(list(simplex_grid(3, 400, block=999)))
    assert len(np.unique(grid, axis=0)) == len(grid) == 402 * 401 // 2
    targets = laws.predict(grid) @ shares
    assert found.predicted <= targets.min() + 1e-9
    np.testing.assert_allclose(found.weights, grid[targets.argmin()], atol=0.02)
    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert (found.weights >= 0).all()
    assert found.predicted <= found.grid_predicted
