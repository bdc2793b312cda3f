"""The mixture that mixing laws think best, beside a plain search of the whole grid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megatron_chameleon.mixture.law_optimum import (
    MOST_GRID_POINTS,
    grid_steps,
    law_optimum,
    simplex_grid,
)
from megatron_chameleon.mixture.mixing_laws import MixingLaws


def random_laws(rng, num_losses, num_domains):
    return MixingLaws(
        constant=rng.uniform(1, 3, num_losses),
        scale=rng.uniform(0.2, 1.5, num_losses),
        exponents=rng.normal(0, 3, (num_losses, num_domains)),
    )


def optimum(laws, shares, low=0.0, high=1.0):
    domains = laws.exponents.shape[1]
    least, most = np.zeros(domains) + low, np.zeros(domains) + high
    return law_optimum(laws, shares, least, most, start=np.full(domains, 1 / domains))


@pytest.mark.parametrize("domains", [1, 2, 3, 4])
def test_the_grid_holds_every_mixture_once(domains):
    steps = 6
    plainly = {
        point for point in itertools.product(range(7), repeat=domains) if sum(point) == steps
    }
    found = np.concatenate(list(simplex_grid(domains, steps, block=10)))
    assert {tuple(row) for row in np.round(found * steps).astype(int).tolist()} == plainly
    assert len(found) == len(plainly) == math.comb(steps + domains - 1, domains - 1)


@pytest.mark.parametrize("domains", [1, 2, 5, 17, 100, 700])
def test_the_grid_is_as_fine_as_it_may_be(domains):
    steps = grid_steps(domains)
    assert math.comb(steps + domains - 1, domains - 1) <= MOST_GRID_POINTS
    if steps < 64:
        assert math.comb(steps + domains, domains - 1) > MOST_GRID_POINTS


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_below_every_point_of_a_fine_grid(seed):
    rng = np.random.default_rng(seed)
    laws, shares = random_laws(rng, 4, 3), rng.dirichlet(np.ones(4))
    found = optimum(laws, shares)
    grid = np.concatenate(list(simplex_grid(3, 400)))
    targets = laws.predict(grid) @ shares
    assert found.predicted <= targets.min() + 1e-9
    assert found.predicted == pytest.approx(targets.min(), abs=1e-3)
    np.testing.assert_allclose(found.weights, grid[targets.argmin()], atol=0.02)
    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert (found.weights >= 0).all()
    assert found.predicted <= found.grid_predicted


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_of_many_domains_has_no_direction_to_go(seed):
    """At the optimum all domains with a weight have one slope, and no other domain a lower one."""
    rng = np.random.default_rng(seed)
    laws = random_laws(rng, 13, 17)
    shares = np.full(13, 1 / 13)
    found = optimum(laws, shares)
    slopes = laws.gradient(found.weights, shares)
    used = found.weights > 1e-6
    assert np.ptp(slopes[used]) < 1e-3
    assert (slopes[~used] > slopes[used].min() - 1e-3).all()


def test_bounds_are_kept():
    rng = np.random.default_rng(0)
    laws, shares = random_laws(rng, 2, 4), np.array([0.5, 0.5])
    low, high = np.full(4, 0.1), np.full(4, 0.45)
    found = optimum(laws, shares, low, high)
    assert (found.weights >= low - 1e-9).all()
    assert (found.weights <= high + 1e-9).all()
    grid = np.concatenate(list(simplex_grid(4, 60)))
    inside = grid[((grid >= low) & (grid <= high)).all(axis=1)]
    assert found.predicted <= (laws.predict(inside) @ shares).min() + 1e-9
    assert found.predicted > optimum(laws, shares).predicted


def test_bounds_between_the_points_of_the_grid_still_give_a_mixture():
    laws = random_laws(np.random.default_rng(0), 2, 40)
    low, high = np.full(40, 0.02), np.full(40, 0.04)
    found = optimum(laws, np.array([1.0, 0.0]), low, high)
    assert found.weights.sum() == pytest.approx(1)
    assert (found.weights >= low - 1e-9).all()
    with pytest.raises(ValueError, match="start must lie between"):
        optimum(laws, np.array([1.0, 0.0]), np.full(40, 0.03), high)


def test_a_domain_that_may_have_no_weight_gets_none():
    laws = random_laws(np.random.default_rng(0), 2, 3)
    start = np.array([0.5, 0.5, 0.0])
    found = law_optimum(laws, np.ones(2) / 2, np.zeros(3), np.array([1.0, 1.0, 0.0]), start)
    assert found.weights[2] == 0
