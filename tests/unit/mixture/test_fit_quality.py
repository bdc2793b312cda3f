"""The quality of fits on held-out runs, and mixtures far from the trained ones."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.fit_quality import folds_of, held_out_predictions, reach_of


def test_each_run_is_held_out_once_and_predicted_from_the_other_runs():
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


def test_a_mixture_far_from_the_trained_mixtures_extrapolates():
    trained = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    reach = reach_of(trained[7], trained)
    assert (reach.nearest, reach.distance, reach.outside) == (7, 0.0, ())
    distances = [
        [np.abs(a - b).sum() / 2 for n, b in enumerate(trained) if n != m]
        for m, a in enumerate(trained)
    ]
    assert reach.usual == pytest.approx(np.quantile([min(row) for row in distances], 0.95))
    assert not reach.extrapolates
    # This mixture is in a gap: each weight is in the range of the trained weights.
    corners = np.eye(3) * 0.94 + 0.02
    rng = np.random.default_rng(0)
    trained = np.concatenate([0.98 * row + 0.02 * rng.dirichlet(np.ones(3), 20) for row in corners])
    reach = reach_of(np.full(3, 1 / 3), trained)
    assert (reach.outside, reach.distance > reach.usual) == ((), True)
    assert reach.extrapolates
