"""The mixtures that a swarm is trained on."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_chameleon.mixture.regmix import REGMIX_SAMPLING, quantize, sample_mixtures

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
    for fewer in (20, 199):  # a larger swarm extends a smaller one
        np.testing.assert_array_equal(sampled(count=fewer), mixtures[:fewer])


def test_mixtures_are_distinct_and_not_far_above_the_prior():
    near = sampled(count=300, smallest_weight=1e-3, near_duplicate=0.02)
    apart = np.abs(near[:, None] - near).sum(axis=2)[np.triu_indices(300, 1)]
    assert (apart > 0.002).all()
    step, bound = REGMIX_SAMPLING.smallest_weight, 15 * PRIOR
    assert (sampled(count=400) <= bound / (1 - 7 * step) + step).all()
    assert (sampled(count=400, max_upweighting=1e9)[:, -1] > bound[-1] + step).any()


def quantized_directly(row, smallest):
    """Largest remainders, one weight at a time."""
    steps = round(1 / smallest)
    kept = [weight if weight >= smallest else 0.0 for weight in row]
    target = [weight / sum(kept) * steps for weight in kept]
    whole = [int(weight) for weight in target]
    for _ in range(steps - sum(whole)):
        left = [w - n for w, n in zip(target, whole, strict=True)]
        whole[int(np.argmax(left))] += 1
    return np.array(whole) / steps


def test_weights_are_rounded_by_largest_remainders():
    rows = np.random.default_rng(5).dirichlet(np.full(6, 0.4), size=300)
    found = quantize(rows, 0.01)
    for row, result in zip(rows, found, strict=True):
        np.testing.assert_allclose(result, quantized_directly(row, 0.01), atol=1e-12)
    assert (found[rows < 0.01] == 0).all()
    assert np.abs(found - rows).max() < 0.07
