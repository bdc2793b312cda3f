"""Minimize any predicted loss over mixtures, within bounds and near a prior.

The problem is min f(w) + lambda KL(w || p) over mixtures w with low <= w <= high, where f is
known only by its values, such as a mean of trees. The penalty is that of Olmix and of mirror
descent: lambda -> infinity gives the mixture within the bounds that is nearest to the prior p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy.special import rel_entr

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.weights import ROUNDING

# Concentrations of the Dirichlet distributions of candidates, from single domains to the centre.
CONCENTRATIONS = np.geomspace(1.0, 1000.0, 7)
# The local search starts from this many candidates.
NUM_STARTS = 4
# Moves of the local search: the first and the smallest size, and the factor by which the size
# shrinks when no move gains LEAST_GAIN times the range of their values.
FIRST_STEP, LAST_STEP, SHRINKING, LEAST_GAIN = 0.1, 1e-3, 4.0, 1e-3
# Maximum number of moves between domains other than the one with the largest weight.
MAX_MOVES = 128
# Sizes of moves along the gradient, as multiples of the current size, and shares of Newton's step.
ALONG_GRADIENT = np.geomspace(0.25, 16.0, 7)
ALONG_NEWTON = np.geomspace(0.125, 2.0, 5)
MAX_ROUNDS = 100
BLOCK = 2000


@dataclasses.dataclass(frozen=True, eq=False)
class MixtureOptimum:
    """The mixture with the smallest value found."""

    weights: Array
    """[k], within the bounds, summing to 1."""
    objective: float
    """f at ``weights``, without the penalty."""
    divergence: float
    """KL(weights || prior), in nats."""
    num_values: int
    """Number of mixtures at which f was computed."""


def check_bounds(low: Array, high: Array) -> None:
    """Raise ValueError if no mixture lies between ``low`` [k] and ``high`` [k]."""
    if not ((low >= 0) & (low <= high)).all():
        bad = int(np.argmin((low >= 0) & (low <= high)))
        raise ValueError(
            f"smallest weight {low[bad]:g} of domain {bad} must be >= 0, and at most its largest "
            f"weight {high[bad]:g}"
        )
    if low.sum() > 1 + ROUNDING:
        raise ValueError(f"the smallest weights sum to {low.sum():.6g}, more than 1: lower them")
    if high.sum() < 1 - ROUNDING:
        raise ValueError(f"the largest weights sum to {high.sum():.6g}, less than 1: raise them")


def nearest_mixtures(points: Array, low: Array, high: Array) -> Array:
    """Return the mixtures [n, k] within the bounds that are nearest to ``points`` [n, k].

    The Euclidean projection shifts all weights of a row by the same number and clips them.

    Raises:
        ValueError: if no mixture lies within the bounds.
    """
    check_bounds(low, high)
    return _along(points, np.ones_like(low), low, high)


def nearest_by_divergence(prior: Array, low: Array, high: Array) -> Array:
    """Return the mixture [k] within the bounds with the smallest divergence KL(w || prior).

    It scales all weights of the prior by the same number and clips them.

    Args:
        prior: [k], >= 0, not all 0. The weight of a domain with prior 0 is ``low``.
        low: [k] smallest weights.
        high: [k] largest weights.

    Raises:
        ValueError: if no mixture lies within the bounds.
    """
    high = np.where(prior > 0, high, low)
    check_bounds(low, high)
    scaled = np.maximum(prior / prior.sum(), np.finfo(np.float64).tiny)
    return _along(np.zeros((1, len(low))), scaled, low, high)[0]


def _along(points: Array, direction: Array, low: Array, high: Array) -> Array:
    """Return clip(x + t d, low, high) for each row x of ``points``, with t such that it sums to 1.

    Each weight is linear in t between two of the points where a weight reaches a bound, and the sum
    does not fall with t. The sums are those of the clipped weights: cumulative sums of slopes lose
    entries of the direction that are tiny compared with others.
    """

    def clipped(t: Array) -> Array:
        return np.clip(points + t * direction, low, high)

    edges = np.sort(np.concatenate([(low - points) / direction, (high - points) / direction], 1))
    # The first edge at which the sum is 1 or more; it is the last one if rounding hides it.
    first, last = np.zeros((len(points), 1), np.intp), np.full((len(points), 1), 2 * len(low) - 1)
    while (first < last).any():
        middle = (first + last) // 2
        sums = clipped(np.take_along_axis(edges, middle, axis=1)).sum(axis=1, keepdims=True)
        reaches = sums >= 1.0 - ROUNDING
        first, last = np.where(reaches, first, middle + 1), np.where(reaches, middle, last)
    begin, end = (
        np.take_along_axis(edges, edge, axis=1) for edge in (np.maximum(last - 1, 0), last)
    )
    missing = 1.0 - clipped(begin).sum(axis=1, keepdims=True)
    added = (clipped(end) - clipped(begin)).sum(axis=1, keepdims=True)
    along = np.divide(missing, added, out=np.zeros_like(added), where=added > 0)
    return clipped(begin + np.clip(along, 0.0, 1.0) * (end - begin))


@dataclasses.dataclass(frozen=True, eq=False)
class Limits:
    """Prior and bounds of the weights of k domains.

    Attributes:
        prior: [k], >= 0, summing to 1. With a penalty for the divergence from it, a domain with
            prior 0 and without a smallest weight has weight 0, unless the other domains cannot have
            all of the weight.
        low: [k] smallest weights.
        high: [k] largest weights.
    """

    prior: Array
    low: Array
    high: Array

    def __post_init__(self) -> None:
        """Raise ValueError if no mixture lies within the bounds."""
        check_bounds(self.low, self.high)

    @property
    def placed_prior(self) -> Array:
        """The mixture within the bounds that is nearest to the prior."""
        try:
            return nearest_by_divergence(self.prior, self.low, self.high)
        except ValueError:  # the domains of the prior cannot have all of the weight
            nearest: Array = nearest_mixtures(self.prior[None], self.low, self.high)[0]
            return nearest


def minimize_mixture(
    objective: Callable[[Array], Array],
    prior: Array,
    low: Array,
    high: Array,
    *,
    kl: float = 0.0,
    trained: Array | None = None,
    num_draws: int = 10_000,
    seed: int = 0,
    on_values: Callable[[int], object] = lambda count: None,
) -> MixtureOptimum:
    """Minimize ``objective`` + ``kl`` KL(w || prior) over the mixtures within the bounds.

    A global search takes the best of many candidates: Dirichlet samples around the prior and
    around equal weights, the trained mixtures, single domains, and the prior itself, all projected
    onto the bounds. A local search then improves the best few: it moves weight from one domain to
    another, and along the gradient and the Newton step that these moves imply, and shrinks the
    moves where none helps. The moves between two domains span all feasible directions, so the
    result for a smooth convex objective is its global minimum, up to the size of the last moves.

    Args:
        objective: f, mixtures [n, k] -> values [n]; it needs no gradient.
        prior: p, [k], >= 0, not all 0. With ``kl`` above 0, a domain with prior 0 gets weight 0.
        low: [k] smallest weights.
        high: [k] largest weights.
        kl: lambda >= 0, in units of f per nat.
        trained: [runs, k] mixtures to start from, too.
        num_draws: number of Dirichlet samples.
        seed: random seed.
        on_values: called with the number of values computed since its last call.

    Raises:
        ValueError: if no mixture lies within the bounds, or none of them has finite divergence.
    """
    rng, prior = np.random.default_rng(seed), prior / prior.sum()
    if kl > 0:
        high = np.where(prior > 0, high, 0.0)
    check_bounds(low, high)
    assert len(prior) > 1, "one domain has all of the weight"
    count = 0

    def values(mixtures: Array) -> Array:
        nonlocal count
        found = np.empty(len(mixtures))
        for first in range(0, len(mixtures), BLOCK):
            block = mixtures[first : first + BLOCK]
            found[first : first + BLOCK] = objective(block)
            if kl > 0:
                found[first : first + BLOCK] += kl * rel_entr(block, prior).sum(axis=1)
            on_values(len(block))
        count += len(mixtures)
        return found

    allowed = high > 0
    points = [
        prior[None],
        allowed[None] / allowed.sum(),
        np.eye(len(low))[allowed],
        _draws(prior * allowed, num_draws - num_draws // 2, rng),
        _draws(allowed / allowed.sum(), num_draws // 2, rng),
        *([] if trained is None else [trained]),
    ]
    candidates = nearest_mixtures(np.concatenate(points), low, high)
    if kl > 0:  # the optimum of a large penalty
        candidates[0] = nearest_by_divergence(prior, low, high)
    found = values(candidates)
    best = np.argsort(found, kind="stable")[:NUM_STARTS]
    weights = _descend(values, candidates[best], found[best], low, high, rng)
    return MixtureOptimum(
        weights=weights,
        objective=float(objective(weights[None])[0]),
        divergence=float(rel_entr(weights, prior).sum()),
        num_values=count,
    )


def _draws(centre: Array, count: int, rng: np.random.Generator) -> Array:
    """Sample [count, k] from Dirichlets with mean ``centre`` and several concentrations."""
    present = np.flatnonzero(centre)
    drawn = np.zeros((count, len(centre)))
    if not len(present):
        return drawn[:0]
    share = centre[present] / centre[present].sum()
    for first, concentration in enumerate(CONCENTRATIONS * len(present)):
        rows = np.arange(first, count, len(CONCENTRATIONS))
        drawn[np.ix_(rows, present)] = rng.dirichlet(share * concentration, size=len(rows))
    return drawn


def _descend(
    values: Callable[[Array], Array],
    starts: Array,
    found: Array,
    low: Array,
    high: Array,
    rng: np.random.Generator,
) -> Array:
    """Improve ``starts`` [s, k] with the values ``found`` [s]; return the best mixture [k]."""
    starts, found = starts.copy(), found.copy()
    steps = np.full(len(starts), FIRST_STEP)
    for _ in range(MAX_ROUNDS):
        active = np.flatnonzero(steps >= LAST_STEP)
        if not len(active):
            break
        moves = [_moves(starts[each], steps[each], low, high, rng) for each in active]
        of_moves = _by_start(values, moves)
        lines = [
            _lines(starts[each], found[each], moved, of_moved, low, high)
            for each, moved, of_moved in zip(active, moves, of_moves, strict=True)
        ]
        for each, moved, of_moved, line, of_line in zip(
            active, moves, of_moves, lines, _by_start(values, lines), strict=True
        ):
            tried, reached = np.concatenate([moved, line]), np.append(of_moved, of_line)
            best = int(reached.argmin())
            gained = found[each] - reached[best]
            if gained > 0:
                starts[each], found[each] = tried[best], reached[best]
            if gained <= LEAST_GAIN * np.ptp(of_moved):
                steps[each] /= SHRINKING
    return starts[found.argmin()]


def _moves(weights: Array, step: float, low: Array, high: Array, rng: np.random.Generator) -> Array:
    """Return mixtures [moves, k] that differ from ``weights`` [k] by a move between two domains.

    A move has the size ``step``, or less if a bound is nearer. Rows 2 j and 2 j + 1 move weight
    from the domain with the largest weight to the j-th other domain, and back. The following rows
    are the moves between these other domains, or a sample of them.
    """
    k, largest = len(weights), int(weights.argmax())
    others = np.delete(np.arange(k), largest)
    pairs = np.arange((k - 1) * (k - 2))
    if len(pairs) > MAX_MOVES:
        pairs = rng.integers(len(pairs), size=MAX_MOVES)
    first, second = np.divmod(pairs, max(k - 2, 1))
    second += second >= first
    to_and_from = np.stack([np.full(k - 1, largest), others])
    source = np.append(to_and_from.T.ravel(), others[first])
    target = np.append(to_and_from[::-1].T.ravel(), others[second])
    size = np.minimum(step, np.minimum((weights - low)[source], (high - weights)[target]))
    rows, moved = np.arange(len(source)), np.repeat(weights[None], len(source), axis=0)
    moved[rows, source] -= size
    moved[rows, target] += size
    return np.clip(moved, low, high)


def _lines(
    weights: Array, value: float, moves: Array, values: Array, low: Array, high: Array
) -> Array:
    """Return mixtures [n, k] on two lines from ``weights`` [k]: down the gradient, and Newton's.

    The moves between the domain with the largest weight and another one give f to the second order:
    f + g x + h x^2 / 2 if the other domain's weight rises by x. Newton's line ends where the sum of
    these parabolas has its minimum within the bounds.

    Args:
        weights: the mixture.
        value: f at ``weights``.
        moves: [moves, k], as from :func:`_moves`.
        values: [moves] f at ``moves``.
        low: [k] smallest weights.
        high: [k] largest weights.
    """
    others = np.delete(np.arange(len(weights)), weights.argmax())
    rows = 2 * np.arange(len(others))
    up, down = moves[rows, others] - weights[others], weights[others] - moves[rows + 1, others]
    unknown = np.full(len(others), np.nan)
    ahead = np.divide(values[rows] - value, up, out=unknown.copy(), where=up > ROUNDING)
    behind = np.divide(value - values[rows + 1], down, out=unknown.copy(), where=down > ROUNDING)
    ahead, behind = (
        np.where(np.isnan(one), other, one) for one, other in ((ahead, behind), (behind, ahead))
    )
    width = np.maximum(up + down, ROUNDING)
    gradient, curvature = np.zeros(len(weights)), np.zeros(len(weights))
    gradient[others] = np.nan_to_num((ahead * down + behind * up) / width)
    curvature[others] = np.nan_to_num(2 * (ahead - behind) / width)
    if not gradient.any():
        return weights[None]
    longest = max(up.max(), down.max()) / np.abs(gradient).max()
    lines = [nearest_mixtures(weights - longest * ALONG_GRADIENT[:, None] * gradient, low, high)]
    if (convex := curvature > 0).any():
        # The curvature is unknown of the largest weight, and of weights at a bound.
        curvature[~convex] = np.median(curvature[convex])
        for share in ALONG_NEWTON:
            direction = share / curvature
            lines.append(_along((weights - direction * gradient)[None], direction, low, high))
    return np.concatenate(lines)


def _by_start(values: Callable[[Array], Array], mixtures: list[Array]) -> list[Array]:
    """Compute the values of several arrays of mixtures in one batch."""
    ends = np.cumsum([len(each) for each in mixtures])[:-1]
    return np.split(values(np.concatenate(mixtures)), ends)
