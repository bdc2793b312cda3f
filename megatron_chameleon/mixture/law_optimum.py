"""The mixture that mixing laws think best: a grid over the simplex, then a descent from its best.

A law is a constant and an exponential of a linear function, so a sum of laws with shares that are
not negative is convex: what a descent finds is the best there is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import minimize

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.mixing_laws import MixingLaws

MOST_GRID_POINTS = 100_000
FINEST_GRID = 64
TOLERANCE = 1e-12
MAX_STEPS = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class LawOptimum:
    """The best mixture by the laws."""

    weights: Array
    """[k], summing to 1."""
    predicted: float
    """The target at it."""
    grid_weights: Array
    """[k] the best point of the grid."""
    grid_predicted: float
    """The target at that one."""
    grid_steps: int
    """Weights of the grid are multiples of 1 / this."""


def law_optimum(
    laws: MixingLaws, shares: Array, low: Array, high: Array, start: Array
) -> LawOptimum:
    """The weights between ``low`` and ``high`` with the smallest ``shares`` times losses.

    Args:
        laws: of m losses over k domains.
        shares: [m], not negative.
        low: [k] least weights.
        high: [k] greatest weights.
        start: [k] a mixture within them, where no point of the grid is.

    Raises:
        ValueError: if ``start`` is not within the bounds.
    """
    slack = 1e-9
    if not ((start >= low - slack).all() and (start <= high + slack).all()):
        raise ValueError("start must lie between low and high")
    steps = grid_steps(len(low))
    best = _best_on_grid(laws, shares, steps, low, high)
    begin = start if best is None else best
    found = _descent(laws, shares, low, high, begin)
    return LawOptimum(
        weights=found,
        predicted=_target(laws, shares, found),
        grid_weights=begin,
        grid_predicted=_target(laws, shares, begin),
        grid_steps=steps,
    )


def grid_steps(num_domains: int) -> int:
    """The finest grid over the simplex with at most ``MOST_GRID_POINTS`` points."""
    fits = [
        steps
        for steps in range(1, FINEST_GRID + 1)
        if math.comb(steps + num_domains - 1, num_domains - 1) <= MOST_GRID_POINTS
    ]
    return max(fits, default=1)


def simplex_grid(num_domains: int, steps: int, block: int = 4096) -> Iterator[Array]:
    """All mixtures in multiples of 1 / ``steps``, [up to ``block``, num_domains] at a time.

    The places of num_domains - 1 bars among the steps say how many lie between two of them.
    """
    places = itertools.combinations(range(steps + num_domains - 1), num_domains - 1)
    while chosen := list(itertools.islice(places, block)):
        bars = np.array(chosen, dtype=np.int64).reshape(len(chosen), num_domains - 1)
        edges = np.column_stack(
            [np.full(len(bars), -1), bars, np.full(len(bars), steps + num_domains - 1)]
        )
        yield (np.diff(edges, axis=1) - 1) / steps


def _best_on_grid(
    laws: MixingLaws, shares: Array, steps: int, low: Array, high: Array
) -> Array | None:
    """The best point of the grid within the bounds; None if there is none."""
    best, least = None, math.inf
    for block in simplex_grid(len(low), steps):
        inside = block[((block >= low) & (block <= high)).all(axis=1)]
        if len(inside) == 0:
            continue
        targets = laws.predict(inside) @ shares
        position = int(targets.argmin())
        if targets[position] < least:
            best, least = inside[position], float(targets[position])
    return best


def _descent(laws: MixingLaws, shares: Array, low: Array, high: Array, start: Array) -> Array:
    """Sequential least squares (SLSQP) over the simplex within the bounds."""
    found = minimize(
        lambda weights: _target(laws, shares, weights),
        start,
        jac=lambda weights: laws.gradient(weights, shares),
        method="SLSQP",
        bounds=list(zip(low, high, strict=True)),
        constraints={
            "type": "eq",
            "fun": lambda weights: weights.sum() - 1.0,
            "jac": lambda weights: np.ones_like(weights),
        },
        options={"maxiter": MAX_STEPS, "ftol": TOLERANCE},
    )
    weights = np.clip(found.x, low, high)
    weights /= weights.sum()
    # Rounding, or a descent that gave up: never worse than where it began.
    better = _target(laws, shares, weights) <= _target(laws, shares, start)
    return weights if better else start


def _target(laws: MixingLaws, shares: Array, weights: Array) -> float:
    return float(laws.predict(weights[None])[0] @ shares)
