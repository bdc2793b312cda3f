"""RegMix's regression and optimum, and the quality of fits on held-out runs."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.fit_quality import (
    folds_of,
    held_out_predictions,
    quality_of,
    reach_of,
)
from megatron_chameleon.mixture.regmix import TreeSettings, fit_trees, sampled_optimum
from tests.unit.mixture.public_results import public_results


def table(path):
    return np.loadtxt(path, delimiter=",", skiprows=1)[:, 1:]


def columns(path):
    return [name.partition("pile_")[2] for name in path.open().readline().strip().split(",")[1:]]


def bowls(mixtures):
    """Losses [n, 2], each with its own best mixture."""
    best = np.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    return 2.0 + ((mixtures[:, None] - best) ** 2).sum(axis=2)


def test_the_optimum_is_the_mean_of_the_best_draws():
    prior, seen = np.array([2.0, 1.0, 1.0]), []

    def objective(mixtures):
        seen.append(mixtures)
        return bowls(mixtures)[:, 0]

    counted: list[int] = []
    found = sampled_optimum(
        objective, prior, num_draws=3500, num_best=20, seed=3, on_draws=counted.append
    )
    samples = np.concatenate(seen)
    best = samples[np.argsort(bowls(samples)[:, 0])[:20]]
    np.testing.assert_allclose(found.weights, best.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.spread, best.std(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.low, np.quantile(best, 0.05, axis=0), atol=1e-12)
    np.testing.assert_allclose(samples.mean(axis=0), prior / 4, atol=0.03)
    assert found.predicted_best == pytest.approx(bowls(best)[:, 0].mean())
    assert found.predicted_best < found.predicted_all
    assert sum(counted) == 3500
    np.testing.assert_allclose(found.weights, [0.6, 0.3, 0.1], atol=0.05)


@pytest.fixture(scope="module")
def public():
    folder = public_results("regmix")
    read = {
        f"{part}_{what}": table(folder / f"{part}_{what}_1m.csv")
        for part in ("train", "test")
        for what in ("mixture", "pile_loss")
    }
    names = [name.removesuffix("_val_loss") for name in columns(folder / "train_pile_loss_1m.csv")]
    return read, columns(folder / "train_mixture_1m.csv"), names


CORRELATIONS = {
    "pile_cc": 99.04,
    "arxiv": 99.6,
    "freelaw": 99.7,
    "github": 99.8,
    "dm_mathematics": 97.2,
    "ubuntu_irc": 96.9,
}
"""Loss -> 100 x Spearman of RegMix's trees."""


def test_public_runs_give_the_ranks_and_the_optimum_of_the_paper(public):
    """RegMix's 512 runs predict the order of its 256 held-out ones, and the optimum for Pile-CC."""
    read, domains, names = public
    order = [names.index(name) for name in CORRELATIONS]
    trees = fit_trees(read["train_mixture"], read["train_pile_loss"][:, order], TreeSettings())
    mixtures, losses = read["test_mixture"], read["test_pile_loss"]
    quality = quality_of(trees(mixtures), losses[:, order])
    found = dict(zip(CORRELATIONS, 100 * quality.spearman, strict=True))
    assert found == pytest.approx(CORRELATIONS, abs=0.5)
    prior = read["train_mixture"].mean(axis=0)
    # Pile-CC is the first of CORRELATIONS. The paper takes the best 128 of 100,000 draws.
    best = sampled_optimum(lambda m: trees(m)[:, 0], prior, num_draws=25_000, num_best=32)
    weights = dict(zip(domains, best.weights, strict=True))
    assert 0.85 <= weights["pile_cc"] <= 0.92
    assert max(weights, key=lambda name: weights[name] * (name != "pile_cc")) == "ubuntu_irc"


def test_each_run_is_held_out_once_and_predicted_by_the_others():
    losses = np.arange(12.0).reshape(6, 2)
    seen = []

    def remember(mixtures, values):
        seen.append(values)
        return lambda others: np.full((len(others), 2), values.mean(axis=0))

    folds = folds_of(6, 3, seed=1)
    assert sorted(np.concatenate(folds).tolist()) == list(range(6))
    predicted = held_out_predictions(remember, np.eye(6), losses, folds)
    for fold, values in zip(folds, seen, strict=True):
        assert not {tuple(row) for row in losses[fold]} & {tuple(row) for row in values}
        np.testing.assert_allclose(predicted[fold], np.tile(values.mean(axis=0), (2, 1)))


def test_a_mixture_far_from_the_trained_ones_is_extrapolated():
    trained = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    reach = reach_of(trained[7], trained)
    assert (reach.nearest, reach.distance, reach.outside) == (7, 0.0, ())
    distances = [
        [np.abs(a - b).sum() / 2 for n, b in enumerate(trained) if n != m]
        for m, a in enumerate(trained)
    ]
    assert reach.usual == pytest.approx(np.quantile([min(row) for row in distances], 0.95))
    assert not reach.extrapolates
    # In a gap: each weight is in the range of the trained ones.
    corners = np.eye(3) * 0.94 + 0.02
    rng = np.random.default_rng(0)
    trained = np.concatenate([0.98 * row + 0.02 * rng.dirichlet(np.ones(3), 20) for row in corners])
    reach = reach_of(np.full(3, 1 / 3), trained)
    assert (reach.outside, reach.distance > reach.usual) == ((), True)
    assert reach.extrapolates
