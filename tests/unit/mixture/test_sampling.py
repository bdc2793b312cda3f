"""The mixtures that a swarm is trained on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.mixture.sampling import (
    REGMIX_SAMPLING,
    quantize,
    sample_mixtures,
)

PRIOR = np.array([0.45, 0.25, 0.15, 0.08, 0.04, 0.02, 0.01])


def sampled(count=200, seed=0, prior=PRIOR, **changes):
    return sample_mixtures(prior, count, seed, dataclasses.replace(REGMIX_SAMPLING, **changes))


def test_every_mixture_sums_to_one_in_steps_of_the_smallest_weight():
    mixtures = sampled()
    assert mixtures.shape == (200, 7)
    np.testing.assert_allclose(mixtures.sum(axis=1), 1.0, atol=1e-12)
    steps = mixtures / REGMIX_SAMPLING.smallest_weight
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-8)
    assert (mixtures >= 0).all()


@pytest.mark.parametrize(("fewer", "more"), [(20, 300), (32, 33)])
def test_more_mixtures_begin_with_the_fewer(fewer, more):
    np.testing.assert_array_equal(sampled(count=fewer), sampled(count=more)[:fewer])


def test_mixtures_are_distinct():
    mixtures = sampled(count=100, prior=np.ones(3), smallest_weight=0.05)
    assert len(np.unique(mixtures, axis=0)) == 100
    near = sampled(count=300, smallest_weight=1e-3, near_duplicate=0.02)
    apart = np.abs(near[:, None] - near).sum(axis=2)[np.triu_indices(300, 1)]
    assert (apart > 0.002).all()


def test_no_weight_is_far_above_its_prior():
    step = REGMIX_SAMPLING.smallest_weight
    bound = 15 * PRIOR
    assert (sampled(count=400) <= bound / (1 - 7 * step) + step).all()
    assert (sampled(count=400, max_upweighting=1e9)[:, -1] > bound[-1] + step).any()


def test_the_mean_lies_between_the_prior_and_uniform():
    free = {"max_upweighting": 1e9, "min_strength": 5.0}
    tempered = PRIOR**0.5 / (PRIOR**0.5).sum()
    np.testing.assert_allclose(sampled(count=800, **free).mean(axis=0), tempered, atol=0.02)
    as_it_is = sampled(count=800, prior_exponent=1.0, **free).mean(axis=0)
    np.testing.assert_allclose(as_it_is, PRIOR, atol=0.02)
    alike = sampled(count=800, prior_exponent=0.0, **free).mean(axis=0)
    np.testing.assert_allclose(alike, 1 / 7, atol=0.02)


def test_too_few_distinct_mixtures_are_an_error():
    with pytest.raises(ValueError, match="only 1 distinct"):
        sample_mixtures([1.0], 2, 0)
    with pytest.raises(ValueError, match="fewer than 40"):
        sampled(count=40, prior=np.ones(3), smallest_weight=0.25)
    with pytest.raises(ValueError, match="3200 had a weight above 1 times"):
        sampled(count=2, max_upweighting=1.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": 0}, "count"),
        ({"min_strength": 9.0}, "max_strength"),
        ({"smallest_weight": 0.0}, "smallest_weight"),
        ({"max_upweighting": 0.5}, "max_upweighting"),
        ({"prior": np.array([0.5, np.nan])}, "prior"),
    ],
)
def test_arguments_out_of_range_are_rejected(changes, problem):
    with pytest.raises(ValueError, match=problem):
        sampled(**changes)


def quantized_directly(row, smallest):
    """Largest remainders, one weight at a time."""
    steps = round(1 / smallest)
    kept = [weight if weight >= smallest else 0.0 for weight in row]
    wanted = [weight / sum(kept) * steps for weight in kept]
    whole = [int(weight) for weight in wanted]
    for _ in range(steps - sum(whole)):
        left = [w - n for w, n in zip(wanted, whole, strict=True)]
        whole[int(np.argmax(left))] += 1
    return np.array(whole) / steps


def test_steps_go_to_the_largest_remainders():
    rows = np.random.default_rng(5).dirichlet(np.full(6, 0.4), size=300)
    found = quantize(rows, 0.01)
    for row, result in zip(rows, found, strict=True):
        np.testing.assert_allclose(result, quantized_directly(row, 0.01), atol=1e-12)
    assert (found[rows < 0.01] == 0).all()
    assert np.abs(found - rows).max() < 0.07
