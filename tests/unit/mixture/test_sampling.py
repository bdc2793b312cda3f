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


def drawn(count=200, seed=0, prior=PRIOR, **changes):
    return sample_mixtures(prior, count, seed, dataclasses.replace(REGMIX_SAMPLING, **changes))


def test_every_mixture_sums_to_one_in_steps_of_the_smallest_weight():
    mixtures = drawn()
    assert mixtures.shape == (200, 7)
    np.testing.assert_allclose(mixtures.sum(axis=1), 1.0, atol=1e-12)
    steps = mixtures / REGMIX_SAMPLING.smallest_weight
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-8)
    assert (mixtures >= 0).all()


@pytest.mark.parametrize(("fewer", "more"), [(20, 24), (20, 300), (32, 33), (100, 101)])
def test_more_mixtures_begin_with_the_fewer(fewer, more):
    np.testing.assert_array_equal(drawn(count=fewer), drawn(count=more)[:fewer])


def test_a_mixture_that_comes_up_again_and_again_is_there_once():
    mixtures = drawn(count=100, prior=np.ones(3), smallest_weight=0.05)
    assert len(np.unique(mixtures, axis=0)) == 100
    near = drawn(count=300, smallest_weight=1e-3, near_duplicate=0.02)
    apart = np.abs(near[:, None] - near).sum(axis=2)[np.triu_indices(300, 1)]
    assert (apart > 0.002).all()


def test_no_weight_is_far_above_its_prior():
    step = REGMIX_SAMPLING.smallest_weight
    bound = 15 * PRIOR
    assert (drawn(count=400) <= bound / (1 - 7 * step) + step).all()
    assert (drawn(count=400, max_upweighting=1e9)[:, -1] > bound[-1] + step).any()


def test_the_mean_lies_between_the_prior_and_uniform():
    free = {"max_upweighting": 1e9, "min_strength": 5.0}
    tempered = PRIOR**0.5 / (PRIOR**0.5).sum()
    np.testing.assert_allclose(drawn(count=800, **free).mean(axis=0), tempered, atol=0.02)
    as_it_is = drawn(count=800, prior_exponent=1.0, **free).mean(axis=0)
    np.testing.assert_allclose(as_it_is, PRIOR, atol=0.02)
    alike = drawn(count=800, prior_exponent=0.0, **free).mean(axis=0)
    np.testing.assert_allclose(alike, 1 / 7, atol=0.02)


def test_a_domain_without_tokens_gets_no_weight():
    mixtures = drawn(prior=np.array([0.5, 0.0, 0.5]))
    assert (mixtures[:, 1] == 0).all()
    assert (mixtures[:, [0, 2]] > 0).any(axis=0).all()


def test_fewer_mixtures_than_wanted_are_an_error():
    with pytest.raises(ValueError, match="only 1 distinct"):
        sample_mixtures([1.0], 2, 0)
    with pytest.raises(ValueError, match="fewer than 40"):
        drawn(count=40, prior=np.ones(3), smallest_weight=0.25)
    with pytest.raises(ValueError, match="3200 had a weight above 1 times"):
        drawn(count=2, max_upweighting=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"count": 0}, "count"),
        ({"prior_exponent": -1.0}, "prior exponent"),
        ({"min_strength": 0.0}, "min_strength"),
        ({"min_strength": 9.0}, "max_strength"),
        ({"smallest_weight": 0.0}, "smallest_weight"),
        ({"max_upweighting": 0.5}, "max_upweighting"),
        ({"prior": np.array([0.5, np.nan])}, "prior"),
        ({"prior": np.array([0.0, 0.0])}, "prior"),
        ({"prior": np.ones((2, 2))}, "prior"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        drawn(**changes)


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


def test_more_domains_than_steps_leave_the_heaviest():
    row = np.full((1, 50), 1 / 50)
    row[0, 17] += 1e-9
    found = quantize(row, 0.1)
    assert found[0, 17] == 1
    assert found.sum() == 1
