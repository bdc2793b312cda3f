import math

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import multivariate_normal, norm

from megatron_chameleon.mixture import fit_surrogate
from megatron_chameleon.mixture.fit_quality import folds_of, quality_of
from megatron_chameleon.mixture.surrogate import (
    CONSTANT_VARIANCE,
    fit_gaussian_process,
    gp_objective,
    held_out_posteriors,
    hyperparameter_prior,
    optimism_of_halves,
    simplex_least_squares,
)
from tests.unit.mixture.public_results import public_results

FEATURES = ("sqrt", "log")


def mixtures_of(count, domains=3, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(domains), count)


def covariance_plainly(one, other, features, parameters, unit):
    """Compute the prior covariance of two mixtures, one domain at a time."""
    lengths, (linear, rbf, _, epsilon) = np.exp(parameters[:-4]), np.exp(parameters[-4:])
    center, products, squares = center_plainly(features, epsilon), 0.0, 0.0
    for w, v, length, middle in zip(one, other, lengths, center, strict=True):
        if features == "sqrt":
            a, b = math.sqrt(w), math.sqrt(v)
        else:
            a, b = (math.log(1 + x / epsilon) / math.log(1 + 1 / epsilon) for x in (w, v))
        products += (a - middle) * (b - middle) / (unit * length) ** 2
        squares += (a - b) ** 2 / (unit * length) ** 2
    return CONSTANT_VARIANCE + linear**2 * products + rbf**2 * math.exp(-squares / 2)


def center_plainly(features, epsilon):
    rows = mixtures_of(14)
    if features == "sqrt":
        return np.sqrt(rows).mean(axis=0)
    return (np.log(1 + rows / epsilon) / math.log(1 + 1 / epsilon)).mean(axis=0)


@pytest.mark.parametrize("features", FEATURES)
def test_the_likelihood_and_posterior_equal_those_of_a_plain_gaussian_process(features):
    rows, others = mixtures_of(14), mixtures_of(3, seed=1)
    losses = np.sin(5 * rows[:, 0]) + rows[:, 1]
    losses = (losses - losses.mean()) / losses.std()
    process = fit_gaussian_process(rows, losses, features)
    parameters, unit = process.parameters, process.unit

    def covariances(some, their):
        return np.array(
            [[covariance_plainly(a, b, features, parameters, unit) for b in their] for a in some]
        )

    noisy = covariances(rows, rows) + (process.noise_variance + 1e-8) * np.eye(14)
    center, spread = hyperparameter_prior(3)
    value, gradient = gp_objective(parameters, rows, losses, features, unit)
    expected = -multivariate_normal(np.zeros(14), noisy).logpdf(losses)
    expected -= norm(center, spread).logpdf(parameters).sum() - norm(0, spread).logpdf(0).sum()
    assert value + 7 * math.log(2 * math.pi) == pytest.approx(expected, rel=1e-8)
    elsewhere = center + 0.3 * np.random.default_rng(2).normal(size=7)
    value, gradient = gp_objective(elsewhere, rows, losses, features, unit)
    numeric = approx_fprime(
        elsewhere, lambda some: gp_objective(some, rows, losses, features, unit)[0], 1e-6
    )
    np.testing.assert_allclose(gradient, numeric, rtol=1e-3, atol=1e-3)

    cross = covariances(others, rows)
    posterior = covariances(others, others) - cross @ np.linalg.solve(noisy, cross.T)
    np.testing.assert_allclose(
        process.mean(others), cross @ np.linalg.solve(noisy, losses), atol=1e-6
    )
    np.testing.assert_allclose(process.covariance(others), posterior, atol=1e-6)
    np.testing.assert_allclose(process.variance(others), np.diagonal(posterior), atol=1e-6)


@pytest.mark.parametrize("runs", [40, 170])
def test_held_out_posteriors_depend_on_other_runs_alone(runs):
    """Otherwise the held-out errors of noise would be too small."""
    rng = np.random.default_rng(3)
    rows, losses, others = mixtures_of(runs, domains=7), *rng.normal(size=(2, runs))
    folds = folds_of(runs, 5, 0)
    means, variances = held_out_posteriors(rows, losses, "sqrt", folds)
    for fold in folds[:2]:
        changed = losses.copy()
        changed[fold] = others[fold]
        found = held_out_posteriors(rows, changed, "sqrt", [fold])
        np.testing.assert_array_equal(found[0][fold], means[fold])
        np.testing.assert_array_equal(found[1][fold], variances[fold])


def test_a_gaussian_process_recovers_a_smooth_function_of_one_domain():
    rows, others = mixtures_of(40, domains=6), mixtures_of(200, domains=6, seed=1)

    def smooth(mixtures):
        return np.log(mixtures[:, 2] + 0.02)

    center, spread = smooth(rows).mean(), smooth(rows).std()
    process = fit_gaussian_process(rows, (smooth(rows) - center) / spread, "log")
    np.testing.assert_allclose(center + spread * process.mean(others), smooth(others), atol=0.02)
    assert process.parameters[:6].argmin() == 2


def test_stacking_weights_are_the_best_point_of_the_simplex():
    errors = np.random.default_rng(0).normal(size=(30, 3)) @ np.diag([1.0, 1.5, 4.0])
    found = simplex_least_squares(errors)
    assert found.sum() == pytest.approx(1)
    points = np.random.default_rng(1).dirichlet(np.ones(3), 20_000)
    assert ((errors @ found) ** 2).sum() <= ((errors @ points.T) ** 2).sum(axis=0).min() + 1e-9


def test_stacking_prefers_the_law_on_laws_and_trees_on_steps_and_intervals_cover():
    rng = np.random.default_rng(0)
    rows, others = mixtures_of(96), mixtures_of(400, seed=1)
    exponents = np.array([-3.0, 0.5, -0.5])

    def expected(mixtures):
        law = 2 + 0.9 * np.exp(mixtures @ exponents)
        steps = 2 + 0.5 * (mixtures[:, 0] > 0.3) + 0.8 * (mixtures[:, 1] > 0.45)
        return np.column_stack([law, steps])

    noise = 0.02
    surrogate = fit_surrogate(rows, expected(rows) + noise * rng.normal(size=(96, 2)))
    weights, quality = surrogate.report.weights, surrogate.report.quality
    assert sum(weights.values()) == pytest.approx(np.ones(2))
    assert max(weights, key=lambda name: weights[name][0]) == "law"
    assert max(weights, key=lambda name: weights[name][1]) == "trees"
    for loss in range(2):
        best = min(quality[name].mae[loss] for name in weights)
        assert quality["stack"].mae[loss] <= 1.2 * best
    mean, error = surrogate.predict(others)
    measured = expected(others) + noise * rng.normal(size=(400, 2))
    covered = (np.abs(measured - mean) < norm.ppf(0.95) * error).mean(axis=0)
    assert (covered >= 0.82).all(), covered
    assert covered[0] <= 0.97, covered


def test_a_law_that_explodes_in_one_fold_does_not_dominate_the_stack():
    rng = np.random.default_rng(2)
    rows = rng.dirichlet(np.full(8, 0.3), 16)
    quality = fit_surrogate(rows, 6 + rng.normal(0, 0.2, (16, 2))).report.quality
    errors = {name: each.mae.mean() for name, each in quality.items()}
    assert errors["stack"] < 1.2 * min(errors.values())  # twice as large without limits of the law


def test_draws_agree_with_predictions_and_depend_on_the_seed_alone():
    rng = np.random.default_rng(0)
    rows, others = mixtures_of(24), mixtures_of(5, seed=1)
    losses = 2 + np.exp(rows @ np.array([[-2.0, 0.5], [0.3, -1.5], [0.1, 0.2]]))
    losses += 0.02 * rng.normal(size=losses.shape)
    losses[:, 1] *= -1  # a metric may be negative
    surrogate, again = fit_surrogate(rows, losses), fit_surrogate(rows, losses)
    mean, error = surrogate.predict(others)
    drawn = surrogate.sample(others, 4000, seed=1)
    assert drawn.shape == (4000, 5, 2)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=5 * error.max() / np.sqrt(4000))
    # The rest of the variance is the noise of a run, which is the same for all mixtures.
    noise = error**2 - drawn.var(axis=0)
    assert (noise > 0).all()
    np.testing.assert_allclose(
        noise, np.tile(noise.mean(axis=0), (5, 1)), atol=0.1 * error.max() ** 2
    )
    np.testing.assert_array_equal(drawn, again.sample(others, 4000, seed=1))
    assert (drawn != surrogate.sample(others, 4000, seed=2)).all()
    # Neighbouring mixtures have nearly the same expected loss in every draw.
    pair = np.array([others[0], 0.99 * others[0] + 0.01 * others[1]])
    drawn = surrogate.sample(pair, 1000, seed=1)
    assert ((drawn[:, 0] - drawn[:, 1]).std(axis=0) < 0.3 * drawn[:, 0].std(axis=0)).all()


def test_the_optimum_of_each_half_is_priced_by_the_other_half():
    """Without noise nothing is overestimated; with noise it is, by what the other half shows."""
    rows, shares = mixtures_of(32), np.array([0.5, 0.5])
    best = np.array([0.5, 0.3, 0.2])
    bowl = 2 + ((rows - best) ** 2).sum(axis=1, keepdims=True) * [1.0, 2.0]
    grid, seen, targets = mixtures_of(500, seed=7), [], []

    def search(target, trained):
        seen.append({tuple(row) for row in trained})
        targets.append(target)
        return grid[target(grid).argmin()]

    smooth = optimism_of_halves(rows, bowl, shares, search, 2)
    assert (np.abs(smooth) < 0.01).all()
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert not first & second
        assert first | second == {tuple(row) for row in rows}
    assert seen[0] != seen[2]
    seen.clear()
    targets.clear()
    noise = 2 + np.random.default_rng(0).normal(0, 0.3, bowl.shape)
    (found,) = optimism_of_halves(rows, noise, shares, search, 1)
    values = np.array([target(grid) for target in targets])
    first, second = values.argmin(axis=1)
    own, other = values[0, first] + values[1, second], values[1, first] + values[0, second]
    assert found == pytest.approx((other - own) / 2)
    assert found > 0.01


@pytest.mark.parametrize(
    ("rows", "losses", "message"),
    [
        (mixtures_of(7), np.ones((7, 1)), "7 runs"),
        (mixtures_of(9), np.ones((8, 1)), "9 mixtures"),
        (mixtures_of(9), np.full((9, 1), np.nan), "row 0"),
    ],
)
def test_runs_that_cannot_be_fitted_are_rejected(rows, losses, message):
    with pytest.raises(ValueError, match=message):
        fit_surrogate(rows, losses)


def test_public_runs_of_regmix_are_ranked_from_few_runs():
    folder = public_results("regmix")

    def read(name):
        return pd.read_csv(folder / f"{name}_1m.csv", index_col=0)

    names = ("pile_cc", "arxiv", "github", "wikipedia_en", "stackexchange", "dm_mathematics")
    columns = [f"metric/the_pile_{name}_val_loss" for name in names]
    rows, others = (read(f"{part}_mixture").to_numpy() for part in ("train", "test"))
    losses, measured = (read(f"{part}_pile_loss")[columns].to_numpy() for part in ("train", "test"))
    surrogate = fit_surrogate(rows[:64], losses[:64])
    mean, error = surrogate.predict(others)
    assert quality_of(mean, measured).spearman.mean() >= 0.970
    covered = (np.abs(measured - mean) < norm.ppf(0.95) * error).mean()
    assert 0.82 <= covered <= 0.97


def test_public_runs_of_mixing_laws_are_predicted_better_than_by_the_law():
    (path,) = public_results("mixing_laws").glob("five_domains_70m_*.csv")
    data = np.loadtxt(path, delimiter=",", skiprows=1)
    rows, losses = data[:, :5], data[:, 5:]
    errors, covered = [], []
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(26)
        fitted, held_out = order[:20], order[20:]
        mean, error = fit_surrogate(rows[fitted], losses[fitted]).predict(rows[held_out])
        errors.append(np.abs(mean.mean(axis=1) - losses[held_out].mean(axis=1)).mean())
        covered.append(np.abs(mean - losses[held_out]) < norm.ppf(0.95) * error)
    assert np.mean(errors) <= 0.0175
    assert 0.82 <= np.mean(covered) <= 0.97
