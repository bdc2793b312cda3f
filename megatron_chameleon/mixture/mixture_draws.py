"""Mixtures to train a swarm on: Dirichlet draws around the domains' shares of the tokens.

Liu et al.: RegMix, ICLR 2025, section 3.1 and its code.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from megatron_chameleon.mixture.checks import Array, check_positive

# Mixtures that are chosen together: from the draws of their block and what earlier ones left over.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class DrawRule:
    """How the mixtures of a swarm are drawn; the defaults are RegMix's."""

    prior_exponent: float = 0.5
    """The Dirichlet's mean is prior^exponent, renormalised: flatter than the prior below 1."""
    min_strength: float = 0.1
    max_strength: float = 5.0
    """The concentration (sum of the Dirichlet's parameters) is one of ``num_strengths`` values,
    log-spaced between these two."""
    num_strengths: int = 15
    max_upweighting: float = 15.0
    """A draw with a weight above this many times its domain's prior is rejected."""
    smallest_weight: float = 2e-4
    """Smaller weights are 0, and all weights are multiples of it."""
    oversampling: int = 100
    """Draws for each mixture that is wanted; some are rejected, and of the others some are taken at
    random, so that what comes up again and again (one domain alone) is no likelier for it."""
    near_duplicate: float = 1e-5
    """Mixtures whose L1 distance is not above this count as one."""


REGMIX_DRAWS = DrawRule()


def draw_mixtures(
    prior: npt.ArrayLike, count: int, seed: int, rule: DrawRule = REGMIX_DRAWS
) -> Array:
    """``count`` different mixtures; mixture i depends on ``prior``, ``seed``, ``rule`` and i alone.

    So a swarm can be given more members later.

    Weights are quantised by the largest remainder, so that every row sums to 1; rounding each
    weight by itself, as RegMix's code does, leaves sums off by some steps.

    Args:
        prior: [k] shares of the tokens, not negative; they need not sum to 1. A domain without any
            gets no weight.
        count: mixtures wanted.
        seed: of the draws.
        rule: how to draw.

    Returns:
        [count, k] float64, rows that sum to 1 but for rounding.

    Raises:
        ValueError: for arguments that mean nothing, or if fewer than ``count`` different mixtures
            were found.
    """
    shares = check_prior(prior)
    _check_rule(rule, count)
    present = np.flatnonzero(shares)
    chosen = left = np.empty((0, present.size))
    num_blocks, rejected = -(-count // BLOCK), 0
    for block in range(num_blocks):
        rng = np.random.default_rng([seed, block])
        drawn = _dirichlet_draws(shares[present], BLOCK * rule.oversampling, rng, rule)
        allowed = drawn[(drawn <= rule.max_upweighting * shares[present]).all(axis=1)]
        rejected += len(drawn) - len(allowed)
        found = drop_near_duplicates(quantized(allowed, rule.smallest_weight), rule.near_duplicate)
        known = np.concatenate([chosen, left])
        left = np.concatenate([left, _not_near(found, known, rule.near_duplicate)])
        left = left[rng.permutation(len(left))]
        chosen, left = np.concatenate([chosen, left[:BLOCK]]), left[BLOCK:]
    if len(chosen) < count:
        raise ValueError(
            f"only {len(chosen)} different mixtures came of "
            f"{num_blocks * BLOCK * rule.oversampling} draws ({rejected} had a weight above "
            f"{rule.max_upweighting:g} times its prior), fewer than the {count} wanted: ask for "
            "fewer, or allow more upweighting"
        )
    mixtures = np.zeros((count, shares.size))
    mixtures[:, present] = chosen[:count]
    return mixtures


def _not_near(mixtures: Array, known: Array, distance: float) -> Array:
    """The rows of ``mixtures`` whose L1 distance to each of ``known`` is above ``distance``."""
    if not len(known) or not len(mixtures):
        return mixtures
    beyond = np.nextafter(distance, np.inf)  # the bound itself is not searched
    nearest, _ = cKDTree(known).query(mixtures, p=1, distance_upper_bound=beyond)
    return mixtures[np.isinf(nearest)]


def check_prior(prior: npt.ArrayLike) -> Array:
    """``prior`` [k] scaled to sum to 1. Raises ValueError if it is no such vector."""
    shares = np.asarray(prior, dtype=np.float64)
    if shares.ndim != 1 or shares.size == 0:
        raise ValueError(f"prior of shape {shares.shape} must be a vector, one entry per domain")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise ValueError("prior must be finite, not negative, and not all zero")
    scaled: Array = shares / shares.sum()
    return scaled


def _check_rule(rule: DrawRule, count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count}: ask for 1 mixture or more")
    if rule.prior_exponent < 0 or not math.isfinite(rule.prior_exponent):
        raise ValueError(f"prior exponent {rule.prior_exponent}: give a finite number from 0 on")
    check_positive(rule.min_strength, "min_strength")
    check_positive(rule.max_strength, "max_strength")
    if rule.min_strength > rule.max_strength:
        raise ValueError(
            f"min_strength {rule.min_strength:g} is above max_strength {rule.max_strength:g}: "
            "swap them"
        )
    if not 0 < rule.smallest_weight <= 1:
        raise ValueError(
            f"smallest_weight {rule.smallest_weight}: it lies above 0 and at most at 1"
        )
    if not rule.max_upweighting >= 1:
        raise ValueError(f"max_upweighting {rule.max_upweighting}: below 1 no mixture is left")


def _dirichlet_draws(shares: Array, count: int, rng: np.random.Generator, rule: DrawRule) -> Array:
    """[count, k]: each from a Dirichlet of mean ``shares``^exponent and a strength of its own."""
    center = shares**rule.prior_exponent
    center /= center.sum()
    strengths = np.geomspace(rule.min_strength, rule.max_strength, rule.num_strengths)
    chosen = rng.integers(rule.num_strengths, size=count)
    drawn = np.empty((count, shares.size))
    for number, strength in enumerate(strengths):
        rows = np.flatnonzero(chosen == number)
        drawn[rows] = rng.dirichlet(center * strength, size=rows.size)
    return drawn


def quantized(mixtures: Array, smallest: float) -> Array:
    """``mixtures`` [n, k] in steps of ``smallest``: less is 0, and rows keep their sum of 1.

    A step is 1 / round(1 / smallest). Each weight is rounded down, and the steps that are then
    missing go to the largest remainders: no weight is off by a step or more.
    """
    steps = round(1 / smallest)
    kept = np.where(mixtures < smallest, 0.0, mixtures)
    empty = kept.sum(axis=1) == 0  # more domains than steps: the heaviest stays
    kept[empty, mixtures[empty].argmax(axis=1)] = 1.0
    wanted = kept / kept.sum(axis=1, keepdims=True) * steps
    whole = np.floor(wanted)
    missing = steps - whole.sum(axis=1, keepdims=True)
    # A domain that was set to 0 has the remainder 0 and would get a step only after all others.
    order = np.argsort(-(wanted - whole), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    result: Array = (whole + (rank < missing)) / steps
    return result


def drop_near_duplicates(mixtures: Array, distance: float) -> Array:
    """The rows of ``mixtures`` [n, k] in lexicographic order, without those near one before them.

    A row goes if its L1 distance to the last one kept is not above ``distance``.
    """
    ordered = mixtures[np.lexsort(mixtures.T)]
    kept: list[Array] = []
    for row in ordered:
        if not kept or np.abs(row - kept[-1]).sum() > distance:
            kept.append(row)
    return np.array(kept).reshape(-1, mixtures.shape[1])
