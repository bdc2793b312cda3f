"""A fit is judged by the target that is minimised, not by the losses in it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.methods.fits.judgement import judged, lines_of, parameters_of
from megatron_chameleon.mixture.fit_quality import fit_linear, folds_of, held_out_predictions
from megatron_chameleon.mixture.mixture_draws import draw_mixtures
from megatron_chameleon.mixture.regmix import TreeSettings, fit_trees

NAMES = ["a", "b", "c", "d", "e"]
SHARES = np.full(5, 0.2)


def judged_at_noise(noise, shares=SHARES):
    """Five domains, each better the more of it there is, so that their mean is noise."""
    mixtures = draw_mixtures(SHARES, 64, 0)
    losses = 3 - 0.5 * mixtures + np.random.default_rng(0).normal(0, noise, (64, 5))
    folds = folds_of(64, 5, 42)
    settings = TreeSettings(num_trees=300)
    fit, linear = (
        held_out_predictions(method, mixtures, losses, folds)
        for method in (lambda x, y: fit_trees(x, y, settings), fit_linear)
    )
    return judged(fit, linear, losses, shares, "5-fold cross-validation")


def test_good_fits_of_losses_do_not_hide_a_target_that_is_noise():
    judgement = judged_at_noise(0.03)
    assert (judgement.fit.spearman > 0.55).all()
    assert judgement.fit.mae.mean() < 0.5 * judgement.fit.spread.mean()
    assert judgement.fit_of_target.mae[0] > judgement.fit_of_target.spread[0]
    assert judgement.is_no_better_than_a_constant
    *table, verdict = lines_of(NAMES, SHARES, judgement, "more runs may help")
    assert "the target no better than a constant, so the mixture says nothing: more" in verdict
    assert table[-1].split()[:2] == ["the", "target"]
    assert f"{judgement.fit_of_target.mae[0]:.4f}" in table[-1]


def test_a_target_that_is_predicted_gets_no_verdict():
    one = np.array([1.0, 0, 0, 0, 0])
    judgement = judged_at_noise(0.03, one)
    assert not judgement.is_no_better_than_a_constant
    assert judgement.fit_of_target.mae[0] == pytest.approx(judgement.fit.mae[0])
    assert judgement.is_behind_a_linear_fit
    assert "a linear fit predicts the target better" in lines_of(NAMES, one, judgement, "x")[-1]
    exact = np.random.default_rng(1).normal(size=(9, 5))
    fine = judged(exact, exact + 1, exact, one, "x")
    assert lines_of(NAMES, one, fine, "x")[-1].startswith("the target")


def test_the_file_holds_the_figures_of_the_target():
    judgement = judged_at_noise(0.03)
    target = parameters_of(NAMES, judgement)["target"]
    assert target["mae"] > target["mae_of_a_constant"] > 0
    assert set(target) >= {"spearman", "linear_spearman", "linear_mae"}
