"""Data Mixing Laws: L_i(r) = c_i + k_i exp(sum_j t_ij r_j), fitted to losses of a few mixtures.

Ye et al.: Data Mixing Laws: Optimizing Data Mixtures by Predicting Language Modeling Performance,
ICLR 2025.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import minimize

from megatron_chameleon.mixture.checks import Array

# Bounds that no law of losses in nats comes near; they keep exp() finite on the whole simplex.
LOG_BOUNDS = (-20.0, 10.0)
EXPONENT_BOUNDS = (-50.0, 50.0)
MAX_STEPS = 2000
# Starts of their own for fits to a part of the runs, beside the laws of all.
COLD_STARTS = 3


@dataclasses.dataclass(frozen=True)
class LawSettings:
    """How a law is fitted."""

    huber_delta: float = 0.05
    """Residuals above this count linearly (the study's)."""
    ridge: float = 1e-3
    """Of the exponents t, beside the mean over runs of the Huber loss in units of delta^2, so that
    it means the same for any number of runs."""
    num_starts: int = 16
    """Starts of the optimiser for each law."""
    seed: int = 0
    """Of the starts."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixingLaws:
    """One law for each of m losses over k domains."""

    constant: Array
    """[m] c, above 0: the loss that no mixture undercuts."""
    scale: Array
    """[m] k, above 0."""
    exponents: Array
    """[m, k] t: negative where a domain's text lowers the loss."""

    def predict(self, mixtures: Array) -> Array:
        """Losses [n, m] of ``mixtures`` [n, k]."""
        losses: Array = self.constant + self.scale * np.exp(mixtures @ self.exponents.T)
        return losses

    def gradient(self, weights: Array, shares: Array) -> Array:
        """The derivative [k] of ``shares`` [m] times the losses at ``weights`` [k]."""
        grown = shares * self.scale * np.exp(self.exponents @ weights)
        slope: Array = grown @ self.exponents
        return slope


def fit_mixing_laws(
    mixtures: Array,
    losses: Array,
    settings: LawSettings,
    on_fit: Callable[[], object] = lambda: None,
) -> MixingLaws:
    """The laws with the smallest penalised Huber loss that the starts lead to.

    Args:
        mixtures: [n, k] rows that sum to 1.
        losses: [n, m], above 0.
        settings: of the fit.
        on_fit: called after each of the m fits.

    Raises:
        ValueError: for a loss that is not above 0, which no law has.
    """
    _check_positive_losses(losses)
    found = []
    for column in losses.T:
        starts = _starts(mixtures, column, settings)
        found.append(min((_descend(mixtures, column, settings, s) for s in starts), key=_value)[0])
        on_fit()
    return _laws_of(np.array(found))


def refit_mixing_laws(
    laws: MixingLaws,
    mixtures: Array,
    losses: Array,
    settings: LawSettings,
    on_fit: Callable[[], object] = lambda: None,
) -> MixingLaws:
    """Laws of ``losses`` by descents from ``laws`` and from a few starts of their own.

    For fits to all runs but one, or but a few: that moves the laws little, and takes a fraction of
    the time of :func:`fit_mixing_laws`. From ``laws`` alone they would know of the runs that were
    left out, where the others and the ridge leave anything open: with as many unknowns as runs and
    no ridge, laws of mere noise seemed to predict it.

    Args:
        laws: fitted to all runs.
        mixtures: [n, k] of those that are left.
        losses: [n, m].
        settings: of the fit.
        on_fit: called after each of the m fits.
    """
    few = dataclasses.replace(settings, num_starts=min(settings.num_starts, COLD_STARTS))
    found = []
    for column, known in zip(losses.T, _parameters_of(laws), strict=True):
        starts = [*_starts(mixtures, column, few), known]
        found.append(min((_descend(mixtures, column, settings, s) for s in starts), key=_value)[0])
        on_fit()
    return _laws_of(np.array(found))


def penalised_huber(
    parameters: Array, mixtures: Array, losses: Array, settings: LawSettings
) -> tuple[float, Array]:
    """The objective and its gradient [k + 2] at ``parameters`` = (log c, log k, t).

    Args:
        parameters: [k + 2].
        mixtures: [n, k].
        losses: [n].
        settings: of the fit.
    """
    delta, exponents = settings.huber_delta, parameters[2:]
    constant = np.exp(parameters[0])
    grown = np.exp(parameters[1] + mixtures @ exponents)
    residuals = constant + grown - losses
    slopes = np.clip(residuals, -delta, delta)
    # Half the square up to delta; beyond it a line with the slope that the square has there.
    huber = slopes * (residuals - slopes / 2)
    unit = 1.0 / (len(losses) * delta**2)
    value = unit * huber.sum() + settings.ridge * (exponents**2).sum()
    of_exponents = unit * (slopes * grown) @ mixtures + 2 * settings.ridge * exponents
    gradient = np.concatenate(
        [[unit * constant * slopes.sum(), unit * (slopes @ grown)], of_exponents]
    )
    return float(value), gradient


def _check_positive_losses(losses: Array) -> None:
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise ValueError("losses must be finite and above 0: a law has no others")


def _starts(mixtures: Array, losses: Array, settings: LawSettings) -> Iterator[Array]:
    """Starts [k + 2]: for constants from low to just under the least loss, a law with that one.

    With c given, log(L - c) = log k + t r is linear, and its ridge solution is near the optimum
    for that c. So the starts go along the one direction in which the problem is not convex; the
    second half of them is shaken.
    """
    rng = np.random.default_rng(settings.seed)
    design = np.column_stack([np.ones(len(losses)), mixtures])
    penalty = np.diag([1e-6, *[1e-2] * mixtures.shape[1]])
    smooth = -(-settings.num_starts // 2)
    fractions = np.linspace(0.05, 0.95, smooth)
    for number in range(settings.num_starts):
        constant = fractions[number % smooth] * losses.min()
        logs = np.log(losses - constant)
        solution = np.linalg.solve(design.T @ design + penalty, design.T @ logs)
        if number >= smooth:
            solution[1:] += rng.normal(0.0, 1.0 + np.abs(solution[1:]).mean(), len(solution) - 1)
        yield np.concatenate([[np.log(constant)], solution])


def _descend(
    mixtures: Array, losses: Array, settings: LawSettings, start: Array
) -> tuple[Array, float]:
    """The parameters [k + 2] that L-BFGS reaches from ``start``, and the objective there."""
    most = (LOG_BOUNDS[0], float(np.log(losses.max())))
    bounds = [most, LOG_BOUNDS, *[EXPONENT_BOUNDS] * mixtures.shape[1]]
    low, high = np.array(bounds).T
    found = minimize(
        penalised_huber,
        np.clip(start, low, high),
        args=(mixtures, losses, settings),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": MAX_STEPS, "ftol": 1e-12, "gtol": 1e-8},
    )
    return found.x, float(found.fun)


def _value(found: tuple[Array, float]) -> float:
    return found[1]


def _laws_of(parameters: Array) -> MixingLaws:
    """Laws from ``parameters`` [m, k + 2]."""
    return MixingLaws(np.exp(parameters[:, 0]), np.exp(parameters[:, 1]), parameters[:, 2:])


def _parameters_of(laws: MixingLaws) -> Array:
    return np.column_stack([np.log(laws.constant), np.log(laws.scale), laws.exponents])
