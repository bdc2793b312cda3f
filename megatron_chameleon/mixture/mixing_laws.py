"""Data Mixing Laws: fit losses over mixtures, minimize them, and extrapolate by power laws.

A mixing law is L_i(r) = c_i + k_i exp(sum_j t_ij r_j); a power law is L(x) = c + (x0 / x)^a.

Ye et al.: Data Mixing Laws: Optimizing Data Mixtures by Predicting Language Modeling Performance,
ICLR 2025; power laws in section 4 (nested scaling laws).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from megatron_chameleon.mixture.checks import Array

# These bounds are wide for losses in nats, and keep exp() finite on the simplex.
LOG_BOUNDS = (-20.0, 10.0)
EXPONENT_BOUNDS = (-50.0, 50.0)
MAX_LAW_STEPS = 500
# Damping of the descents, relative to the objective's curvature in the logarithm of a loss.
FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-5, 1e-13, 1e4
DAMPING_FACTOR = 3.0
# A descent ends once this many more steps like its last one would not lower the best objective of
# its law by this fraction.
PATIENCE, LAW_TOLERANCE = 300, 1e-9
# Maximum entries of the largest array of a batch of descents (float64, 64 MiB).
BLOCK_ENTRIES = 1 << 23
# A fit to a subset of the runs starts from the laws fitted to all runs, and from this many other
# points.
COLD_STARTS = 8


@dataclasses.dataclass(frozen=True)
class LawSettings:
    """Settings of a fit."""

    huber_delta: float = 0.05
    """Huber loss threshold delta: the loss is linear for larger residuals (the study: 0.05)."""
    ridge: float = 1e-3
    """Ridge penalty on the exponents t, relative to the mean Huber loss over runs in units of
    delta^2. The mean makes the penalty independent of the number of runs."""
    num_starts: int = 16
    """Number of starting points of the optimizer per law."""
    seed: int = 0
    """Seed of the starting points."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixingLaws:
    """Mixing laws of m losses over k domains, one law per loss."""

    constant: Array
    """The constants c [m], > 0: lower bounds of the losses."""
    scale: Array
    """[m] k, > 0."""
    exponents: Array
    """The exponents t [m, k]: negative where a domain's text lowers the loss."""

    def predict(self, mixtures: Array) -> Array:
        """Predict the losses [n, m] of ``mixtures`` [n, k]."""
        return self.constant + self.scale * np.exp(mixtures @ self.exponents.T)

    def gradient(self, weights: Array, shares: Array) -> Array:
        """Return the gradient [k] at ``weights`` [k] of the losses weighted by ``shares`` [m]."""
        grown = shares * self.scale * np.exp(self.exponents @ weights)
        return grown @ self.exponents


def fit_mixing_laws(
    mixtures: Array,
    losses: Array,
    settings: LawSettings,
    on_fit: Callable[[], object] = lambda: None,
    near: MixingLaws | None = None,
) -> MixingLaws:
    """Fit the laws by penalised Huber loss, from several starting points, and keep the best fit.

    ``near`` are laws fitted to all runs, of which these runs are a subset. If ``near`` is passed,
    the starting points are those laws and ``COLD_STARTS`` others. This takes half the time, since
    leaving out a few runs hardly changes the laws. Starting from ``near`` alone, or with only a few
    others, would leak the held-out runs if the other runs and the ridge do not determine the fit:
    with as many unknowns as runs and no ridge, laws that were fitted to noise seemed to predict the
    noise.

    Args:
        mixtures: [n, k] rows that sum to 1.
        losses: [n, m], > 0.
        settings: settings of the fit.
        on_fit: called after each of the m fits.
        near: m laws to start from.

    Raises:
        ValueError: if a loss is not finite or not above 0, so that no law can equal it.
    """
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise ValueError("losses must be finite and above 0")
    count = settings.num_starts if near is None else min(settings.num_starts, COLD_STARTS)
    starts = np.array([_starts(mixtures, row, count, settings.seed) for row in losses.T])
    if near is not None:
        known = np.column_stack([np.log(near.constant), np.log(near.scale), near.exponents])
        starts = np.concatenate([starts, known[:, None]], axis=1)
    # Fit as many laws at once as fit into the memory of a block.
    entries = starts[0].size * max(starts.shape[2], len(losses))
    block, found = max(1, BLOCK_ENTRIES // entries), []
    for first in range(0, len(starts), block):
        laws = slice(first, first + block)
        found.append(_descend(starts[laws], mixtures, losses.T[laws], settings))
        for _ in found[-1]:
            on_fit()
    parameters = np.concatenate(found)
    return MixingLaws(np.exp(parameters[:, 0]), np.exp(parameters[:, 1]), parameters[:, 2:])


def penalised_huber(
    parameters: Array, mixtures: Array, losses: Array, settings: LawSettings
) -> tuple[Array, Array, Array]:
    """Compute the objective of b fits, and its first and approximate second derivatives.

    The curvature is that of iteratively reweighted least squares: the Gauss-Newton matrix of the
    squared residuals, each weighted by min(1, delta / |residual|). The quadratic function with
    these weights is nowhere below the Huber loss.

    Args:
        parameters: [b, k + 2] rows (log c, log k, t).
        mixtures: [n, k].
        losses: [b, n], the losses that each row is fitted to.
        settings: settings of the fit.

    Returns:
        Values [b], gradients [b, k + 2] and curvatures [b, k + 2, k + 2].
    """
    delta, exponents = settings.huber_delta, parameters[:, 2:]
    constant = np.exp(parameters[:, :1])
    grown = np.exp(parameters[:, 1:2] + exponents @ mixtures.T)
    residuals = constant + grown - losses
    slopes = np.clip(residuals, -delta, delta)
    # Huber loss: quadratic up to delta, linear beyond.
    huber = slopes * (residuals - slopes / 2)
    unit = 1.0 / (len(mixtures) * delta**2)
    values = unit * huber.sum(axis=1) + settings.ridge * (exponents**2).sum(axis=1)
    jacobian = np.empty((*parameters.shape, len(mixtures)))  # derivatives of the residuals
    jacobian[:, 0] = constant
    jacobian[:, 1] = grown
    np.multiply(grown[:, None], mixtures.T, out=jacobian[:, 2:])
    gradients = unit * (jacobian @ slopes[..., None])[..., 0]
    gradients[:, 2:] += 2 * settings.ridge * exponents
    weights = unit * delta / np.maximum(np.abs(residuals), delta)
    curvatures = (jacobian * weights[:, None]) @ jacobian.swapaxes(1, 2)
    diagonal = np.arange(2, parameters.shape[1])
    curvatures[:, diagonal, diagonal] += 2 * settings.ridge
    return values, gradients, curvatures


def _starts(mixtures: Array, losses: Array, count: int, seed: int) -> list[Array]:
    """Return starting points [k + 2]: laws with constants from low to just below the smallest loss.

    For fixed c, log(L - c) = log k + t r is linear, and its ridge solution is near the optimum for
    that c. So the starting points differ in c, the only direction in which the problem is not
    convex. The second half of the points is perturbed.
    """
    rng = np.random.default_rng(seed)
    design = np.column_stack([np.ones(len(losses)), mixtures])
    penalty = np.diag([1e-6, *[1e-2] * mixtures.shape[1]])
    smooth = -(-count // 2)
    fractions = np.linspace(0.05, 0.95, smooth)
    starts = []
    for number in range(count):
        constant = fractions[number % smooth] * losses.min()
        logs = np.log(losses - constant)
        solution = np.linalg.solve(design.T @ design + penalty, design.T @ logs)
        if number >= smooth:
            solution[1:] += rng.normal(0.0, 1.0 + np.abs(solution[1:]).mean(), len(solution) - 1)
        starts.append(np.concatenate([[np.log(constant)], solution]))
    return starts


def _descend(starts: Array, mixtures: Array, losses: Array, settings: LawSettings) -> Array:
    """Minimize the objectives of m laws by projected Levenberg-Marquardt, from all starts at once.

    Each step solves (curvature + damping * scale * I) step = -gradient for the parameters that no
    bound holds. A step that lowers the objective is taken, and lowers the damping; any other step
    raises the damping. A descent ends if ``PATIENCE`` more steps like its last one would not lower
    the best objective of its law.

    Args:
        starts: [m, s, k + 2], s starting points per law.
        mixtures: [n, k].
        losses: [m, n].
        settings: settings of the fit.

    Returns:
        The best parameters [m, k + 2] of each law.
    """
    num_laws, num_starts, size = starts.shape
    targets, law = np.repeat(losses, num_starts, axis=0), np.repeat(np.arange(num_laws), num_starts)
    low, high = np.full((2, len(law), size), [[[EXPONENT_BOUNDS[0]]], [[EXPONENT_BOUNDS[1]]]])
    low[:, :2], high[:, 0], high[:, 1] = LOG_BOUNDS[0], np.log(targets.max(axis=1)), LOG_BOUNDS[1]
    points = np.clip(starts.reshape(-1, size), low, high)
    values, gradients, curvatures = penalised_huber(points, mixtures, targets, settings)
    scale = (targets**2).mean(axis=1) / settings.huber_delta**2
    damping, diagonal = np.full(len(law), FIRST_DAMPING), np.arange(size)
    running = np.arange(len(law))
    for _ in range(MAX_LAW_STEPS):
        here, slope, least, most = (each[running] for each in (points, gradients, low, high))
        held = ((here <= least) & (slope > 0)) | ((here >= most) & (slope < 0))
        slope[held] = 0.0
        matrix = np.where(held[:, :, None] | held[:, None], 0.0, curvatures[running])
        matrix[:, diagonal, diagonal] += (damping * scale)[running, None] + held
        step = np.linalg.solve(matrix, slope[..., None])[..., 0]
        there = np.clip(here - step, least, most)
        value, *derivatives = penalised_huber(there, mixtures, targets[running], settings)
        drop = values[running] - value
        lower = drop > 0
        moved = running[lower]
        points[moved], values[moved] = there[lower], value[lower]
        gradients[moved], curvatures[moved] = (each[lower] for each in derivatives)
        damping[running] *= np.where(lower, 1 / DAMPING_FACTOR, DAMPING_FACTOR)
        np.maximum(damping, MIN_DAMPING, out=damping)
        best = values.reshape(num_laws, num_starts).min(axis=1)[law[running]]
        hopeless = value - PATIENCE * drop >= best * (1 - LAW_TOLERANCE)
        ended = lower & hopeless & (damping[running] < FIRST_DAMPING)
        running = running[~ended & (damping[running] < MAX_DAMPING)]
        if not len(running):
            break
    chosen = values.reshape(num_laws, num_starts).argmin(axis=1)
    return points.reshape(starts.shape)[np.arange(num_laws), chosen]


MAX_GRID_POINTS = 100_000
FINEST_GRID = 64
TOLERANCE = 1e-12
MAX_DESCENT_STEPS = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class LawOptimum:
    """The mixture with the smallest predicted loss."""

    weights: Array
    """[k], summing to 1."""
    predicted: float
    """Target at ``weights``."""
    grid_weights: Array
    """Best point [k] of the grid."""
    grid_predicted: float
    """Target at ``grid_weights``."""
    grid_steps: int
    """Number of grid steps: the weights of the grid are multiples of 1 / ``grid_steps``."""


def law_optimum(
    laws: MixingLaws, shares: Array, low: Array, high: Array, start: Array
) -> LawOptimum:
    """Minimize the losses weighted by ``shares`` over mixtures between ``low`` and ``high``.

    A law is a constant plus the exponential of a linear function, so a weighted sum of laws is
    convex and a local search (SLSQP) finds its global minimum. The search starts from the best
    point of a grid.

    Args:
        laws: laws of m losses over k domains.
        shares: [m], >= 0.
        low: [k] smallest weights.
        high: [k] largest weights.
        start: [k] a mixture within the bounds, used if no grid point lies within them.
    """

    def value(weights: Array) -> float:
        return float(laws.predict(weights[None])[0] @ shares)

    # Choose the finest grid that has at most MAX_GRID_POINTS points.
    steps = max(
        (
            steps
            for steps in range(1, FINEST_GRID + 1)
            if math.comb(steps + len(low) - 1, len(low) - 1) <= MAX_GRID_POINTS
        ),
        default=1,
    )
    begin, least = start, math.inf
    for block in simplex_grid(len(low), steps):
        inside = block[((block >= low) & (block <= high)).all(axis=1)]
        if len(inside):
            targets = laws.predict(inside) @ shares
            position = int(targets.argmin())
            if targets[position] < least:
                begin, least = inside[position], float(targets[position])
    found = minimize(
        value,
        begin,
        jac=lambda weights: laws.gradient(weights, shares),
        method="SLSQP",
        bounds=list(zip(low, high, strict=True)),
        constraints={
            "type": "eq",
            "fun": lambda weights: weights.sum() - 1.0,
            "jac": lambda weights: np.ones_like(weights),
        },
        options={"maxiter": MAX_DESCENT_STEPS, "ftol": TOLERANCE},
    )
    weights = np.clip(found.x, low, high)
    weights /= weights.sum()
    # Rounding or a failed search may give a worse mixture than the start.
    if value(weights) > value(begin):
        weights = begin
    return LawOptimum(
        weights=weights,
        predicted=value(weights),
        grid_weights=begin,
        grid_predicted=value(begin),
        grid_steps=steps,
    )


def simplex_grid(num_domains: int, steps: int, block: int = 4096) -> Iterator[Array]:
    """Yield all mixtures in multiples of 1 / ``steps``, in blocks [<= ``block``, num_domains].

    Enumerates by stars and bars: the positions of num_domains - 1 bars among the steps.
    """
    places = itertools.combinations(range(steps + num_domains - 1), num_domains - 1)
    while chosen := list(itertools.islice(places, block)):
        bars = np.array(chosen, dtype=np.int64).reshape(len(chosen), num_domains - 1)
        edges = np.column_stack(
            [np.full(len(bars), -1), bars, np.full(len(bars), steps + num_domains - 1)]
        )
        yield (np.diff(edges, axis=1) - 1) / steps


EXPONENTS = (0.02, 3.0)
MIN_POINTS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class PowerLaws:
    """Power laws: one per curve, all with the same exponent."""

    constant: Array
    """The constants c [curves], >= 0: the losses at infinite x."""
    factor: Array
    """The factors x0^a / unit^a [curves], >= 0: the loss above c at x = ``unit``."""
    exponent: float
    """The exponent a, shared by all curves: the few points of one curve do not determine it."""
    unit: float
    """Unit of x, chosen to keep numbers near 1."""

    def predict(self, x: float) -> Array:
        """Predict the losses [curves] at ``x``."""
        return self.constant + self.factor * (x / self.unit) ** -self.exponent


def fit_power_laws(x: Array, losses: Array) -> PowerLaws:
    """Fit all curves by least squares; c and x0 are exact for each exponent (variable projection).

    Args:
        x: [points] training steps or parameters, increasing, > 0.
        losses: [curves, points], finite.

    Raises:
        ValueError: if there are fewer than three points, which any exponent fits, or x is not
            increasing.
    """
    if len(x) < MIN_POINTS:
        raise ValueError(f"{len(x)} points: a power law needs {MIN_POINTS} or more")
    if not (x[0] > 0 and (np.diff(x) > 0).all()):
        raise ValueError("x must be increasing and > 0")
    unit = float(x[-1])

    def error(log_exponent: float) -> float:
        curve = (x / unit) ** -np.exp(log_exponent)
        constant, factor = _lines(curve, losses)
        residuals = constant[:, None] + factor[:, None] * curve - losses
        return float((residuals**2).sum())

    # The error may have several minima, so only the neighbourhood of a grid's best point is
    # searched.
    row = np.log(np.geomspace(*EXPONENTS, 41))
    best = int(np.argmin([error(value) for value in row]))
    around = (row[max(best - 1, 0)], row[min(best + 1, len(row) - 1)])
    found = minimize_scalar(error, bounds=around, method="bounded", options={"xatol": 1e-10})
    exponent = float(np.exp(found.x))
    constant, factor = _lines((x / unit) ** -exponent, losses)
    return PowerLaws(constant, factor, exponent, unit)


def _lines(curve: Array, losses: Array) -> tuple[Array, Array]:
    """Return c and f [curves], >= 0, that minimize the sum of squares of c + f * curve - losses."""
    centered = curve - curve.mean()
    factor = np.maximum((losses - losses.mean(axis=1, keepdims=True)) @ centered, 0.0)
    factor /= (centered**2).sum()
    constant = losses.mean(axis=1) - factor * curve.mean()
    # Where c would be negative, c is set to 0, so that the line goes through the origin.
    through_origin = np.maximum(losses @ curve, 0.0) / (curve**2).sum()
    negative = constant < 0
    return np.where(negative, 0.0, constant), np.where(negative, through_origin, factor)
