"""Spreads and paired differences, by hand and on draws whose spreads are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_chameleon.report.head_to_head import (
    LEAST_RATIO,
    T_95,
    PairedDifference,
    difference,
    mixture_spread,
)


def test_a_paired_difference_leaves_out_what_seeds_do_to_both():
    theirs = np.array([100.0, 140.0, 60.0])
    gap = difference(theirs - np.array([9.0, 10.0, 11.0]), theirs)
    assert gap.mean == pytest.approx(-10)
    assert gap.standard_error == pytest.approx(1 / math.sqrt(3))
    assert gap.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert gap.is_clear


def test_a_difference_within_its_interval_is_not_clear():
    assert not PairedDifference(
        4.0, 1.0, num_seeds=3
    ).is_clear  # 4.303 standard errors are asked for
    assert PairedDifference(4.4, 1.0, num_seeds=3).is_clear
    assert PairedDifference(4.0, 1.0, num_seeds=4).is_clear
    assert not PairedDifference(2.2, 1.0, num_seeds=50).is_clear  # as if there were eleven


def test_the_quantiles_are_those_of_students_t():
    from scipy.stats import t

    assert pytest.approx(t.ppf(0.975, np.arange(1, len(T_95) + 1)), abs=5e-4) == T_95


def test_the_spread_between_seeds_is_what_neither_mixture_nor_seed_explains():
    additive = np.array([[10.0, 20.0, 30.0], [13.0, 23.0, 33.0]])
    exact = mixture_spread(additive)
    assert exact.seeds == pytest.approx(0, abs=1e-12)
    assert exact.mixtures == pytest.approx(3 / math.sqrt(2))
    residual = np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    assert mixture_spread(additive + residual).seeds == pytest.approx(math.sqrt(4 / 2))
    assert mixture_spread(additive + residual).mixtures == pytest.approx(3 / math.sqrt(2))


def test_without_any_effect_the_ratio_is_around_one_over_the_root_of_the_seeds(rng):
    ratios = [mixture_spread(rng.normal(size=(8, 3))).ratio for _ in range(2000)]
    assert np.sqrt(np.mean(np.square(ratios))) == pytest.approx(1 / math.sqrt(3), rel=0.15)
    assert np.mean(np.array(ratios) >= LEAST_RATIO) < 0.001


def test_known_spreads_are_found(rng):
    found = [
        mixture_spread(
            rng.normal(0, 50, (8, 1)) + rng.normal(0, 80, (1, 3)) + rng.normal(0, 5, (8, 3)) + 300
        )
        for _ in range(500)
    ]
    assert np.sqrt(np.mean([s.seeds**2 for s in found])) == pytest.approx(5, rel=0.05)
    assert np.sqrt(np.mean([s.mixtures**2 for s in found])) == pytest.approx(50, rel=0.08)
    assert all(s.is_distinguishable for s in found)


def test_seeds_that_do_nothing_leave_no_doubt():
    assert mixture_spread(np.array([[1.0, 1.0], [2.0, 2.0]])).ratio == math.inf
    assert mixture_spread(np.full((2, 3), 5.0)).ratio == 0
