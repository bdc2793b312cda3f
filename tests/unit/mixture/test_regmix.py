"""RegMix: sampled mixtures, regression and optimum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from megatron_chameleon.mixture.fit_quality import quality_of, reach_of
from megatron_chameleon.mixture.regmix import (
    REGMIX_SAMPLING,
    TreeSettings,
    fit_trees,
    quantize,
    sample_mixtures,
    sampled_optimum,
)
from tests.unit.mixture.public_results import public_results

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
    for fewer in (20, 199):  # a larger swarm begins with the mixtures of a smaller swarm
        np.testing.assert_array_equal(sampled(count=fewer), mixtures[:fewer])


def test_mixtures_are_distinct_and_not_far_above_the_prior():
    near = sampled(count=300, smallest_weight=1e-3, near_duplicate=0.02)
    apart = np.abs(near[:, None] - near).sum(axis=2)[np.triu_indices(300, 1)]
    assert (apart > 0.002).all()
    step, bound = REGMIX_SAMPLING.smallest_weight, 15 * PRIOR
    assert (sampled(count=400) <= bound / (1 - 7 * step) + step).all()
    assert (sampled(count=400, max_upweighting=1e9)[:, -1] > bound[-1] + step).any()


@pytest.mark.parametrize(("domains", "factor"), [(7, 1), (17, 1), (34, 4), (50, (50 / 17) ** 2)])
def test_strengths_grow_with_the_square_of_the_domains_beyond_regmixs_17(domains, factor):
    prior = 1 / np.arange(1, domains + 1)
    rule = REGMIX_SAMPLING
    scaled = {
        "min_strength": factor * rule.min_strength,
        "max_strength": factor * rule.max_strength,
    }
    expected = sampled(prior=prior, strength_domains=10**6, **scaled)
    np.testing.assert_allclose(sampled(prior=prior), expected, atol=1e-12)
    # A domain without text does not count.
    with_an_empty_one = sampled(prior=np.append(prior, 0.0))
    np.testing.assert_array_equal(with_an_empty_one[:, :-1], sampled(prior=prior))


@pytest.mark.parametrize("domains", [50, 200])
def test_mixtures_contain_most_of_many_domains(domains):
    mixtures = sampled(count=100, prior=1 / np.arange(1, domains + 1))
    assert (mixtures > 0).sum(axis=1).mean() > 0.6 * domains
    assert (mixtures > 0).sum(axis=0).min() >= 5
    assert mixtures.max(axis=1).mean() < 0.4
    uniform = reach_of(np.full(domains, 1 / domains), mixtures)
    assert uniform.distance < uniform.usual


def quantized_directly(row, smallest):
    """Round by largest remainders, one weight at a time."""
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


def test_the_optimum_is_the_mean_of_the_best_samples():
    center, prior, seen = np.array([0.6, 0.3, 0.1]), np.array([2.0, 1.0, 1.0]), []
    counted: list[int] = []

    def objective(mixtures):
        seen.append(mixtures)
        return ((mixtures - center) ** 2).sum(axis=1)

    found = sampled_optimum(
        objective, prior, num_draws=3500, num_best=20, seed=3, on_draws=counted.append
    )
    assert sum(counted) == 3500
    samples = np.concatenate(seen)
    np.testing.assert_allclose(samples.mean(axis=0), prior / 4, atol=0.03)
    best = samples[np.argsort(objective(samples))[:20]]
    np.testing.assert_allclose(found.weights, best.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.weights, center, atol=0.05)
    np.testing.assert_allclose(found.spread, best.std(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.low, np.quantile(best, 0.05, axis=0), atol=1e-12)
    assert found.predicted_best == pytest.approx(objective(best).mean())
    assert found.predicted_best < found.predicted_all


CORRELATIONS = {"pile_cc": 99.04, "dm_mathematics": 97.2, "ubuntu_irc": 96.9}
"""Maps each loss to 100 x the Spearman correlation of RegMix's trees."""


def test_public_runs_reproduce_the_papers_correlations_and_optimum():
    """RegMix's 512 runs predict the order of its 256 held-out runs, and the optimum for Pile-CC."""
    folder = public_results("regmix")

    def read(name):
        return pd.read_csv(folder / f"{name}_1m.csv", index_col=0)

    columns = [f"metric/the_pile_{name}_val_loss" for name in CORRELATIONS]
    losses, held_out = (read(f"{part}_pile_loss")[columns] for part in ("train", "test"))
    runs = read("train_mixture")
    trees = fit_trees(runs.to_numpy(), losses.to_numpy(), TreeSettings())
    quality = quality_of(trees(read("test_mixture").to_numpy()), held_out.to_numpy())
    found = dict(zip(CORRELATIONS, 100 * quality.spearman, strict=True))
    assert found == pytest.approx(CORRELATIONS, abs=0.5)
    # Column 0 is Pile-CC, the first loss of CORRELATIONS. The paper averages the best 128 of
    # 100,000 samples; a quarter of both numbers suffices here.
    prior = runs.to_numpy().mean(axis=0)
    best = sampled_optimum(lambda m: trees(m)[:, 0], prior, num_draws=25_000, num_best=32)
    weights = dict(zip(runs.columns, best.weights, strict=True))
    first, second = sorted(weights, key=lambda name: -weights[name])[:2]
    assert (first, second) == ("train_the_pile_pile_cc", "train_the_pile_ubuntu_irc")
    assert 0.85 <= weights[first] <= 0.92
