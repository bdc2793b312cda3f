"""Surrogate of losses over mixtures: a stack of several regressions, with standard errors.

No single regression is best everywhere: on a few dozen runs a mixing law or a Gaussian process
errs less than boosted trees, on hundreds of runs trees catch up, and this depends on the loss.
:func:`fit_surrogate` cross-validates all of them on the given runs and averages them with the
non-negative weights that minimize the cross-validated error of each loss (Breiman: Stacked
Regressions, 1996). The models are

- ``trees``: gradient-boosted trees (RegMix);
- ``law``: c + k exp(sum_j t_j w_j) (Data Mixing Laws). Since the weights w sum to 1, k can be moved
  into t, which gives the log-linear law exp(c') + exp(sum_j t'_j w_j) of Olmix;
- ``gp-sqrt``, ``gp-log``: Gaussian processes on the square roots sqrt(w_j), and on the logarithms
  log(1 + w_j / eps).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, lapack, solve_triangular
from scipy.optimize import minimize, nnls

from megatron_chameleon.mixture.checks import Array, as_matrix
from megatron_chameleon.mixture.fit_quality import (
    FitQuality,
    Predict,
    folds_of,
    held_out_predictions,
    quality_of,
)
from megatron_chameleon.mixture.mixing_laws import LawSettings, fit_mixing_laws
from megatron_chameleon.mixture.regmix import TreeSettings, fit_trees

Features: TypeAlias = Literal["sqrt", "log"]

FEWEST_RUNS = 8
NUM_FOLDS = 5
# A search overestimates the gain of its optimum by an amount that falls with the number of runs n:
# as 1/n if the optimum is the bottom of a smooth bowl, whose place the errors of the models shift,
# and as 1/sqrt(n) if the models fit only noise. The factor from half of the runs to all of them is
# between both.
OPTIMISM_OF_ALL_RUNS = 2**-0.75
# 300 trees with this learning rate predict as well as RegMix's 1000 trees with rate 0.01.
TREES = TreeSettings(num_trees=300, learning_rate=0.03)
LAW = LawSettings(num_starts=8)
# The prior of each loss's stacking weights, which is the same for all losses, counts as this many
# runs.
STACKING_PRIOR_RUNS = 10.0

# Gaussian priors of the logarithms of a Gaussian process's hyperparameters, for losses with
# standard deviation 1 and features with mean variance 1.
LENGTH_SD = 1.0
LINEAR_SCALE, LINEAR_SD = 0.5, 1.0
RBF_SCALE, RBF_SD = 0.5, 1.0
NOISE_SCALE, NOISE_SD = 0.1, 1.0
EPSILON, EPSILON_SD = 1e-3, 1.0
CONSTANT_VARIANCE = 4.0
JITTER = 1e-8
# Fits start from the prior's length scales times e, that is from a smoother function: fits that
# start from a rougher one end in worse optima more often.
START_LENGTH = 1.0
MAX_GP_STEPS, GP_TOLERANCE = 60, 1e-6
# Hyperparameters are fitted to at most this many runs first, and then to all runs.
FIRST_GP_RUNS = 128
# To save time, the second of these fits takes at most this many steps if a fold is held out.
HELD_OUT_GP_STEPS = 5


def weight_features(weights: Array, features: Features, log_epsilon: float) -> tuple[Array, Array]:
    """Map ``weights`` [n, k] to features [n, k] from 0 to 1; also return the log_epsilon gradient.

    The features are sqrt(w), or log(1 + w / eps) / log(1 + 1 / eps).
    """
    weights = np.maximum(weights, 0.0)
    if features == "sqrt":
        return np.sqrt(weights), np.zeros_like(weights)
    epsilon = np.exp(log_epsilon)
    whole = np.log1p(1 / epsilon)
    mapped = np.log1p(weights / epsilon) / whole
    return mapped, (mapped / (1 + epsilon) - weights / (weights + epsilon)) / whole


@dataclasses.dataclass(frozen=True, eq=False)
class GaussianProcess:
    """Posterior of a Gaussian process for one loss, standardized to mean 0 and variance 1.

    The covariance of two mixtures with scaled features a and b [k] is
    4 + linear^2 a.b + rbf^2 exp(-|a - b|^2 / 2), where a_j is feature j over length scale j: a
    domain with a long length scale hardly matters (automatic relevance determination; Rasmussen &
    Williams: Gaussian Processes for Machine Learning, 2006, sections 2.2 and 5.1).
    """

    features: Features
    parameters: Array
    """Logarithms [k + 4] of the length scales, the linear and the RBF standard deviation, the
    standard deviation of the noise, and eps."""
    scaled: Array
    """Scaled features [n, k] of the runs."""
    center: Array
    """Mean [k] of the runs' features."""
    unit: float
    """Root mean variance of the runs' features."""
    factor: Array
    """Lower Cholesky factor [n, n] of the covariance of the runs' losses."""
    coefficients: Array
    """Inverse covariance times the standardized losses [n]."""

    @property
    def noise_variance(self) -> float:
        """Variance of the noise of a run's standardized loss."""
        return float(np.exp(2 * self.parameters[-2]))

    def _scale(self, mixtures: Array) -> Array:
        mapped, _ = weight_features(mixtures, self.features, self.parameters[-1])
        return (mapped - self.center) / self.unit * np.exp(-self.parameters[:-4])

    def mean(self, mixtures: Array) -> Array:
        """Return the posterior means [n] at ``mixtures`` [n, k]."""
        return _covariance(self._scale(mixtures), self.scaled, self.parameters) @ self.coefficients

    def variance(self, mixtures: Array) -> Array:
        """Return the posterior variances [n] of the expected loss, without noise."""
        others = self._scale(mixtures)
        prior = CONSTANT_VARIANCE + np.exp(2 * self.parameters[-4]) * (others**2).sum(axis=1)
        explained = solve_triangular(
            self.factor, _covariance(self.scaled, others, self.parameters), lower=True
        )
        return np.maximum(prior + np.exp(2 * self.parameters[-3]) - (explained**2).sum(axis=0), 0.0)

    def covariance(self, mixtures: Array) -> Array:
        """Return the posterior covariance [n, n] of the expected losses at ``mixtures``."""
        others = self._scale(mixtures)
        explained = solve_triangular(
            self.factor, _covariance(self.scaled, others, self.parameters), lower=True
        )
        return _covariance(others, others, self.parameters) - explained.T @ explained


def _covariance(one: Array, other: Array, parameters: Array) -> Array:
    """Return the prior covariance [n, n'] of scaled features [n, k] and [n', k]."""
    products = one @ other.T
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * products
    rbf = np.exp(2 * parameters[-3] - np.maximum(squares, 0.0) / 2)
    return CONSTANT_VARIANCE + np.exp(2 * parameters[-4]) * products + rbf


def hyperparameter_prior(num_domains: int) -> tuple[Array, Array]:
    """Return means and standard deviations [k + 4] of the Gaussian prior of log hyperparameters."""
    length = 0.5 * np.log(num_domains)
    scales = np.log([LINEAR_SCALE, RBF_SCALE, NOISE_SCALE, EPSILON])
    return (
        np.concatenate([np.full(num_domains, length), scales]),
        np.array([*[LENGTH_SD] * num_domains, LINEAR_SD, RBF_SD, NOISE_SD, EPSILON_SD]),
    )


def gp_objective(
    parameters: Array, mixtures: Array, losses: Array, features: Features, unit: float
) -> tuple[float, Array]:
    """Compute a Gaussian process's negative log posterior of its hyperparameters, and its gradient.

    The value is the negative log marginal likelihood (without its constant) plus the penalty of
    :func:`hyperparameter_prior`.

    Args:
        parameters: [k + 4], as in :class:`GaussianProcess`.
        mixtures: [n, k].
        losses: [n], standardized.
        features: features of the weights.
        unit: scale of the features.
    """
    num_runs = len(losses)
    linear, rbf, noise = np.exp(2 * parameters[-4:-1])
    mapped, slopes = weight_features(mixtures, features, parameters[-1])
    shrink = np.exp(-parameters[:-4]) / unit
    scaled = (mapped - mapped.mean(axis=0)) * shrink
    products = scaled @ scaled.T
    squares = np.diagonal(products)
    similar = rbf * np.exp(products - (squares[:, None] + squares) / 2)
    covariance = CONSTANT_VARIANCE + linear * products + similar
    covariance.flat[:: num_runs + 1] += noise + JITTER
    factor, failed = lapack.dpotrf(covariance, lower=1)
    if failed:
        return 1e25, np.zeros_like(parameters)
    coefficients = cho_solve((factor, True), losses)
    inverse, _ = lapack.dpotri(factor, lower=1)
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    value = losses @ coefficients / 2 + np.log(np.diagonal(factor)).sum()
    # The derivative with respect to the covariance is -outer / 2.
    outer = np.outer(coefficients, coefficients) - inverse
    weighted = outer * similar
    sums = weighted.sum(axis=1)
    of_scaled = sums[:, None] * scaled - weighted @ scaled - linear * (outer @ scaled)
    gradient = np.empty_like(parameters)
    gradient[:-4] = -(scaled * of_scaled).sum(axis=0)
    gradient[-4] = -linear * (outer * products).sum()
    gradient[-3] = -sums.sum()
    gradient[-2] = -noise * np.trace(outer)
    gradient[-1] = (of_scaled * ((slopes - slopes.mean(axis=0)) * shrink)).sum()
    center, spread = hyperparameter_prior(len(parameters) - 4)
    away = (parameters - center) / spread
    return float(value + (away**2).sum() / 2), gradient + away / spread


def fit_gaussian_process(
    mixtures: Array, losses: Array, features: Features, last_steps: int = MAX_GP_STEPS
) -> GaussianProcess:
    """Fit a Gaussian process to one loss; its hyperparameters maximize their posterior density.

    Args:
        mixtures: [n, k].
        losses: [n], standardized.
        features: features of the weights.
        last_steps: maximum optimizer steps of the fit to more than ``FIRST_GP_RUNS`` runs, which
            starts from a fit to some of the runs.
    """
    center, _ = hyperparameter_prior(mixtures.shape[1])
    mapped, _ = weight_features(mixtures, features, center[-1])
    unit = float(np.sqrt(max(mapped.var(axis=0).mean(), 1e-12)))
    parameters = center + np.repeat([START_LENGTH, 0.0], [len(center) - 4, 4])
    step = -(-len(losses) // FIRST_GP_RUNS)
    stages = [(step, MAX_GP_STEPS), (1, last_steps)] if step > 1 else [(1, MAX_GP_STEPS)]
    for every, max_steps in stages:
        parameters = minimize(
            gp_objective,
            parameters,
            args=(mixtures[::every], losses[::every], features, unit),
            jac=True,
            method="L-BFGS-B",
            bounds=[*[(-6.0, 8.0)] * (len(center) - 1), (-12.0, 3.0)],
            options={"maxiter": max_steps, "ftol": GP_TOLERANCE},
        ).x
    mapped, _ = weight_features(mixtures, features, parameters[-1])
    scaled = (mapped - mapped.mean(axis=0)) / unit * np.exp(-parameters[:-4])
    covariance = _covariance(scaled, scaled, parameters)
    covariance.flat[:: len(losses) + 1] += np.exp(2 * parameters[-2]) + JITTER
    factor: Array = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    return GaussianProcess(
        features=features,
        parameters=parameters,
        scaled=scaled,
        center=mapped.mean(axis=0),
        unit=unit,
        factor=factor,
        coefficients=cho_solve((factor, True), losses),
    )


def held_out_posteriors(
    mixtures: Array, losses: Array, features: Features, folds: list[Array]
) -> tuple[Array, Array]:
    """Return held-out means and variances [n], noise included, of standardized ``losses`` [n].

    The hyperparameters of each fold are fitted without the held-out runs, and from the same start
    as those of all runs. A start from the hyperparameters of all runs would leak the held-out runs,
    because the fit would end in the optimum next to that start; the hyperparameters themselves
    would leak more, even with hundreds of runs. To save time, fits to more than ``FIRST_GP_RUNS``
    runs take at most ``HELD_OUT_GP_STEPS`` steps after the fit to some of these runs.
    """
    means, variances = np.empty_like(losses), np.empty_like(losses)
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(losses)), fold)
        process = fit_gaussian_process(mixtures[rest], losses[rest], features, HELD_OUT_GP_STEPS)
        means[fold] = process.mean(mixtures[fold])
        variances[fold] = process.variance(mixtures[fold]) + process.noise_variance
    return means, variances


@dataclasses.dataclass(frozen=True, eq=False)
class SurrogateReport:
    """Cross-validated quality of the models behind a surrogate, and their stacking weights."""

    quality: dict[str, FitQuality]
    """Quality of each model on held-out runs, and of ``stack``, whose weights were fitted to the
    other folds."""
    weights: dict[str, Array]
    """Stacking weight [m] of each model for each loss; the weights of a loss sum to 1."""
    folds: list[Array]
    """Positions of the runs in each fold of the cross-validation."""
    held_out: Array
    """Predictions [n, m] of ``stack`` for the held-out runs of each fold."""


@dataclasses.dataclass(frozen=True, eq=False)
class Surrogate:
    """Predictions of m losses over mixtures of k domains, with their uncertainty."""

    report: SurrogateReport
    models: dict[str, Predict]
    """The models behind the surrogate, by name, as functions from mixtures [n, k] to losses."""
    _processes: list[list[GaussianProcess]]
    """The Gaussian processes of each loss."""
    _shares: Array
    """[m, processes] share of each Gaussian process in the uncertainty; sums to 1 per loss."""
    _scale: Array
    """[m] standard deviation of a loss whose standardized standard deviation is 1."""
    _correlation: Array
    """[m, m] correlation of the errors of the losses."""

    def predict(self, mixtures: npt.ArrayLike) -> tuple[Array, Array]:
        """Predict the losses of new runs.

        Args:
            mixtures: [n, k].

        Returns:
            The means [n, m], and the standard errors [n, m] of the losses of new runs: the
            uncertainty of the expected losses and the noise of a run.
        """
        rows = as_matrix(mixtures, "mixtures", "mixture")
        variance = np.empty((len(rows), len(self._scale)))
        for loss, processes in enumerate(self._processes):
            variance[:, loss] = sum(
                share * (process.variance(rows) + process.noise_variance)
                for share, process in zip(self._shares[loss], processes, strict=True)
            )
        return self.mean(rows), np.sqrt(variance) * self._scale

    def sample(self, mixtures: npt.ArrayLike, count: int, seed: int) -> Array:
        """Sample the expected losses at ``mixtures`` [n, k] jointly, without the noise of a run.

        The draws are correlated between mixtures, so the differences of two columns are draws of
        the difference between two mixtures. They are also correlated between losses, as the
        cross-validated errors are. The cost grows with n^3.

        Returns:
            [count, n, m] float64.
        """
        rows = as_matrix(mixtures, "mixtures", "mixture")
        rng = np.random.default_rng(seed)
        normal = rng.normal(size=(count, len(rows), len(self._scale)))
        normal = normal @ np.linalg.cholesky(self._correlation).T
        drawn = np.empty_like(normal)
        for loss, processes in enumerate(self._processes):
            covariance = sum(
                share * process.covariance(rows)
                for share, process in zip(self._shares[loss], processes, strict=True)
            )
            assert isinstance(covariance, np.ndarray)
            covariance.flat[:: len(rows) + 1] += 1e-6 * np.diagonal(covariance).mean() + JITTER
            drawn[:, :, loss] = normal[:, :, loss] @ np.linalg.cholesky(covariance).T
        return self.mean(rows) + drawn * self._scale

    def mean(self, rows: Array) -> Array:
        """Predict the losses [n, m] of mixtures [n, k], faster than :meth:`predict`."""
        weights = self.report.weights
        return np.sum([weights[name] * fit(rows) for name, fit in self.models.items()], axis=0)


def fit_surrogate(
    mixtures: npt.ArrayLike,
    losses: npt.ArrayLike,
    seed: int = 0,
    on_fit: Callable[[], object] = lambda: None,
) -> Surrogate:
    """Fit the surrogate to runs; cross-validation on these runs chooses the stacking weights.

    Args:
        mixtures: [n, k] weights of the runs, >= 0; at least 8 runs.
        losses: [n, m] losses of the runs, or other metrics to minimize.
        seed: seed of the folds, the trees and the law's starting points.
        on_fit: called after each of the 4 m fits to all runs (4 models, m losses).

    Raises:
        ValueError: if shapes do not match, there are too few runs, or a value is not finite or out
            of range.
        ImportError, OSError: LightGBM is not installed, or its library cannot be loaded.
    """
    rows = as_matrix(mixtures, "mixtures", "mixture")
    values = as_matrix(losses, "losses", "run")
    if len(rows) != len(values):
        raise ValueError(f"{len(rows)} mixtures but {len(values)} rows of losses: pass one per run")
    if len(rows) < FEWEST_RUNS:
        raise ValueError(f"{len(rows)} runs: a surrogate needs {FEWEST_RUNS} or more")
    folds = folds_of(len(rows), NUM_FOLDS, seed)
    trees = dataclasses.replace(TREES, seed=seed)
    law_settings = dataclasses.replace(LAW, seed=seed)
    models: dict[str, Predict] = {
        "trees": fit_trees(rows, values, trees, on_fit),
        "law": fit_limited_laws(rows, values, law_settings, on_fit),
    }
    held_out = {
        "trees": held_out_predictions(
            lambda some, their: fit_trees(some, their, trees), rows, values, folds
        ),
        "law": held_out_predictions(
            lambda some, their: fit_limited_laws(some, their, law_settings), rows, values, folds
        ),
    }
    center, spread = values.mean(axis=0), values.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    kinds: dict[str, Features] = {"gp-sqrt": "sqrt", "gp-log": "log"}
    processes: list[list[GaussianProcess]] = [[] for _ in values.T]
    variances = np.empty((len(kinds), *values.shape))
    for number, (name, features) in enumerate(kinds.items()):
        held_out[name] = np.empty_like(values)
        for loss, column in enumerate(((values - center) / spread).T):
            process = fit_gaussian_process(rows, column, features)
            mean, variances[number, :, loss] = held_out_posteriors(rows, column, features, folds)
            held_out[name][:, loss] = center[loss] + spread[loss] * mean
            processes[loss].append(process)
            on_fit()
        models[name] = _gp_predictions([each[number] for each in processes], center, spread)
    predicted = np.array(list(held_out.values()))
    weights = _stacking_weights(predicted - values)
    stacked = np.empty_like(values)
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(values)), fold)
        others = _stacking_weights(predicted[:, rest] - values[rest])
        stacked[fold] = (others[:, None] * predicted[:, fold]).sum(axis=0)
    shares = _uncertainty_shares(weights[-len(kinds) :], predicted[-len(kinds) :] - values)
    # Scale the variance such that held-out errors have the predicted variance on average.
    standardized = (stacked - values) / np.sqrt((shares[:, None] * variances).sum(axis=0))
    scale = np.sqrt((standardized**2).mean(axis=0))
    return Surrogate(
        SurrogateReport(
            {
                name: quality_of(each, values)
                for name, each in {**held_out, "stack": stacked}.items()
            },
            dict(zip(held_out, weights, strict=True)),
            folds,
            stacked,
        ),
        models,
        processes,
        shares.T,
        scale,
        _error_correlation(standardized),
    )


def optimism_of_halves(
    mixtures: Array,
    losses: Array,
    shares: Array,
    search: Callable[[Predict, Array], Array],
    num_splits: int,
    seed: int = 0,
    on_fit: Callable[[], object] = lambda: None,
) -> Array:
    """Measure by how much searches overestimate the gain of their optimum, by cross-fitting.

    A search finds a low prediction partly because the models err downwards there. Models of other
    runs do not share this error. So the runs are split into two halves at random, the optimum that
    is found with the models of one half is priced by the models of the other half, and vice versa.
    The difference between both prices of an optimum is its optimism. The predictions of a fixed
    baseline cancel in the mean over the two halves, so the optimism is the same for all baselines.

    Args:
        mixtures: [n, k], with n of at least twice ``FEWEST_RUNS``.
        losses: [n, m].
        shares: [m] share of each loss in the target.
        search: function from the target, as a function of mixtures, and the mixtures of the runs
            that it was fitted to, to the weights [k] of its optimum.
        num_splits: number of random splits.
        seed: random seed.
        on_fit: called after each of the 2 ``num_splits`` fits.

    Returns:
        [num_splits] mean optimism of both optima of a split, in the unit of the target. It is that
        of half of the runs; multiply by ``OPTIMISM_OF_ALL_RUNS`` for that of all.
    """

    def target_of(surrogate: Surrogate) -> Predict:
        return lambda others: surrogate.mean(others) @ shares

    optimism = np.zeros(num_splits)
    for split in range(num_splits):
        targets, optima = list[Predict](), list[Array]()
        for half in folds_of(len(mixtures), 2, seed + split):
            targets.append(target_of(fit_surrogate(mixtures[half], losses[half], seed)))
            optima.append(search(targets[-1], mixtures[half]))
            on_fit()
        first, second = (target(np.stack(optima)) for target in targets)
        optimism[split] = (second[0] - first[0] + first[1] - second[1]) / 2
    return optimism


def fit_limited_laws(
    mixtures: Array,
    losses: Array,
    settings: LawSettings,
    on_fit: Callable[[], object] = lambda: None,
) -> Predict:
    """Fit mixing laws; clip predictions to the range of the losses, extended by its width each way.

    Far from the runs, the exponential of a law that was fitted to few or noisy runs can be many
    times larger than any loss, and an error of this size outweighs all others in the stack.

    Args:
        mixtures: [n, k].
        losses: [n, m] of any sign. A law is positive, so each column with a value <= 0 is shifted
            for the fit.
        settings: settings of the fits.
        on_fit: called after each of the m fits.
    """
    lowest, highest = losses.min(axis=0), losses.max(axis=0)
    shift = np.where(lowest > 0, 0.0, losses.std(axis=0) + 1e-6 - lowest)
    laws = fit_mixing_laws(mixtures, losses + shift, settings, on_fit)
    width = highest - lowest
    low, high = lowest - width, highest + width
    return lambda others: np.clip(laws.predict(others) - shift, low, high)


def _gp_predictions(processes: list[GaussianProcess], center: Array, spread: Array) -> Predict:
    return lambda others: (
        center + spread * np.column_stack([process.mean(others) for process in processes])
    )


def _stacking_weights(errors: Array) -> Array:
    """Return non-negative weights [models, m] that sum to 1 and minimize the squared errors.

    The weights of a loss are shrunk towards weights that are the same for all losses, because a few
    runs do not determine the weights of each loss.

    Args:
        errors: [models, n, m] errors of held-out predictions.
    """
    num_models = len(errors)
    # Divide by the error of the best model, so that all losses count alike.
    best = np.sqrt((errors**2).mean(axis=1).min(axis=0))
    relative = errors / np.where(best > 0, best, 1.0)
    common = simplex_least_squares(relative.reshape(num_models, -1).T)
    penalty = np.sqrt(STACKING_PRIOR_RUNS) * (np.eye(num_models) - common[:, None])
    return np.column_stack(
        [
            simplex_least_squares(np.vstack([each, penalty]))
            for each in np.moveaxis(relative, 2, 0).swapaxes(1, 2)
        ]
    )


def simplex_least_squares(design: Array) -> Array:
    """Return w [models] >= 0 with sum 1 that minimizes |design w|^2, for a design [rows, models].

    Minimizing |design w|^2 + (sum w - 1)^2 over w >= 0 gives the same w up to its sum: at t u with
    sum u = 1, the best t gives q / (1 + q), which increases with q = |design u|^2.
    """
    size = np.sqrt((design**2).mean()) or 1.0
    system = np.vstack([design / size, np.ones(design.shape[1])])
    found, _ = nnls(system, np.append(np.zeros(len(design)), 1.0))
    total = found.sum()
    return found / total if total > 0 else np.full(len(found), 1.0 / len(found))


def _uncertainty_shares(weights: Array, errors: Array) -> Array:
    """Return the shares [processes, m] of the Gaussian processes in the uncertainty.

    The shares are proportional to the stacking weights; if these are 0, the process with the
    smallest error is used.
    """
    best = (errors**2).mean(axis=1).argmin(axis=0)
    shares = weights + 1e-9 * (np.arange(len(weights))[:, None] == best)
    return shares / shares.sum(axis=0)


def _error_correlation(errors: Array) -> Array:
    """Return the correlation [m, m] of standardized errors [n, m], shrunk towards independence."""
    num_runs, num_losses = errors.shape
    scale = np.sqrt((errors**2).mean(axis=0))
    scaled = errors / np.where(scale > 0, scale, 1.0)
    trust = num_runs / (num_runs + num_losses)
    correlation = trust * (scaled.T @ scaled) / num_runs
    np.fill_diagonal(correlation, 1.0)
    return correlation
