"""MixMin: the maximum, the strength of the prior, and predicted gains."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scipy.optimize import linprog, minimize
from scipy.special import rel_entr

from megatron_chameleon.mixture.mixmin import (
    TargetText,
    bootstrap_mixmin,
    choose_strength,
    document_folds,
    explained_shares,
    mixmin_weights,
    predicted_gain,
)
from megatron_chameleon.mixture.optimum import Limits

VOCAB = 30


def models(rng: np.random.Generator, k: int, concentration: float = 0.3):
    """Return k distributions over the vocabulary."""
    return rng.dirichlet(np.full(VOCAB, concentration), size=k)


def sampled_text(rng, experts, weights, *, documents=20, length=200, spread=0.0) -> TargetText:
    """Sample documents from the mixture; ``spread`` varies the weights between documents."""
    probabilities = []
    for _ in range(documents):
        own = weights if not spread else rng.dirichlet(np.maximum(weights / spread, 1e-3))
        tokens = rng.choice(VOCAB, size=length, p=own @ experts)
        probabilities.append(experts[:, tokens].T)
    count = documents * length
    return TargetText(
        np.concatenate(probabilities) + 1e-12,
        np.full(count, 1 / count),
        np.repeat(np.arange(documents), length),
        np.zeros(documents, np.int64),
    )


def unlimited(k: int) -> Limits:
    return Limits(np.full(k, 1 / k), np.zeros(k), np.ones(k))


def penalized(text: TargetText, limits: Limits, strength: float, weights: np.ndarray) -> float:
    penalty = strength * rel_entr(limits.prior, weights).sum() if strength else 0.0
    return text.log_likelihood(weights) - penalty


@pytest.mark.parametrize("k", [2, 7, 40])
@pytest.mark.parametrize("strength", [0.0, 0.1])
@pytest.mark.parametrize("bounded", [False, True])
def test_the_objective_is_that_of_a_general_solver(k, strength, bounded):
    rng = np.random.default_rng([k, bounded])
    text = sampled_text(rng, models(rng, k), rng.dirichlet(np.full(k, 0.3)))
    low = np.full(k, 0.3 / k if bounded else 0.0)
    high = np.full(k, max(1.5 / k, 0.3) if bounded else 1.0)
    limits = Limits(rng.dirichlet(np.ones(k)), low, high)
    found = mixmin_weights(text, limits, strength)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found >= low - 1e-12).all()
    assert (found <= high + 1e-12).all()
    start = limits.placed_prior * 0.999 + 0.001 / k
    solved = minimize(
        lambda w: -penalized(text, limits, strength, w),
        np.clip(start, low, high),
        bounds=list(zip(np.maximum(low, 1e-9), high, strict=True)),
        constraints=[{"type": "eq", "fun": lambda w: w.sum() - 1}],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-13},
    ).x
    assert penalized(text, limits, strength, found) >= penalized(text, limits, strength, solved) - (
        1e-5
    )


@pytest.mark.parametrize("difference", [1e-3, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("cap", [0.15, 0.4, 1.0])
def test_models_that_are_nearly_alike_are_weighed(difference, cap):
    """Steps of overrelaxation are long then, and plain EM takes thousands of steps."""
    rng = np.random.default_rng(7)
    experts = models(rng, 8)
    alike = experts[:1] * (experts / experts[:1]) ** difference + 1e-9
    pair = np.concatenate([alike, alike[1:3] * np.exp(rng.normal(0, 1e-3, (2, VOCAB)))])
    text = sampled_text(rng, experts, rng.dirichlet(np.full(8, 0.3)))
    tokens = rng.integers(0, VOCAB, len(text.shares))
    text = dataclasses.replace(text, probabilities=pair[:, tokens].T)
    high = np.ones(10)
    high[rng.permutation(10)[:4]] = cap
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mixmin_weights(text, Limits(np.full(10, 0.1), np.zeros(10), high))
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found <= high).all()
    mixed = text.probabilities @ found
    gradient = text.probabilities.T @ (text.shares / mixed)
    best = linprog(
        -gradient, A_eq=np.ones((1, 10)), b_eq=[1], bounds=np.stack([high * 0, high], axis=1)
    )
    assert -best.fun - gradient @ found < 1e-6


def test_weights_of_sampled_text_are_found():
    rng = np.random.default_rng(0)
    true = np.array([0.6, 0.3, 0.1, 0.0, 0.0])
    text = sampled_text(rng, models(rng, 5), true, documents=50, length=2000)
    np.testing.assert_allclose(mixmin_weights(text, unlimited(5)), true, atol=0.03)


def test_strength_interpolates_between_the_likelihood_and_the_prior():
    rng = np.random.default_rng(1)
    text = sampled_text(rng, models(rng, 4), np.array([0.7, 0.1, 0.1, 0.1]))
    limits = Limits(np.array([0.1, 0.2, 0.3, 0.4]), np.zeros(4), np.ones(4))
    distances = [
        np.abs(mixmin_weights(text, limits, strength) - limits.prior).sum()
        for strength in (0.0, 0.1, 1.0, 10.0, 1000.0, math.inf)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] == 0


def test_cross_validation_prefers_the_prior_where_documents_say_nothing():
    """Documents that are sampled from different domains predict nothing about others."""
    rng = np.random.default_rng(2)
    experts = models(rng, 6)
    few = sampled_text(rng, experts, np.full(6, 1 / 6), documents=8, length=400, spread=3.0)
    many = sampled_text(rng, experts, np.array([0.8, 0.2, 0, 0, 0, 0]), documents=40)
    assert choose_strength(few, unlimited(6)).strength > 0.1
    assert choose_strength(many, unlimited(6)).strength <= 0.03


def test_predicted_gains_are_not_optimistic():
    """The mean over many targets is the gain on new documents, within its standard error."""
    errors, optimistic, covered = [], [], 0
    weights, uniform = np.array([0.3, 0.3, 0.2, 0.2]), np.full(4, 0.25)
    for seed in range(60):
        rng = np.random.default_rng([3, seed])
        experts = models(rng, 4, concentration=2.0)
        text, new = (
            sampled_text(rng, experts, weights, documents=count, length=50, spread=0.3)
            for count in (12, 400)
        )
        fit = choose_strength(text, unlimited(4), strengths=(math.inf, 0.3, 0.03), seed=seed)
        found = mixmin_weights(text, unlimited(4), fit.strength)
        true = new.log_likelihood(found) - new.log_likelihood(uniform)
        gain = predicted_gain(text, fit, uniform)
        errors.append(gain.gain - true)
        optimistic.append(text.log_likelihood(found) - text.log_likelihood(uniform) - true)
        covered += gain.low <= true <= gain.high
    standard_error = np.std(errors, ddof=1) / math.sqrt(len(errors))
    assert abs(np.mean(errors)) < 3 * standard_error
    assert np.mean(optimistic) > 3 * standard_error
    assert covered >= 44  # 90% intervals of 60 targets; fewer by chance once in a thousand


def test_bootstrap_intervals_narrow_with_more_documents():
    rng = np.random.default_rng(4)
    experts, weights = models(rng, 3), np.array([0.5, 0.3, 0.2])
    widths = []
    for documents in (5, 80):
        text = sampled_text(rng, experts, weights, documents=documents, length=60)
        found = mixmin_weights(text, unlimited(3))
        resampled = bootstrap_mixmin(text, unlimited(3), 0.0, found, 50)
        np.testing.assert_allclose(resampled.sum(axis=1), 1)
        widths.append(resampled.std(axis=0).mean())
    assert widths[1] < 0.6 * widths[0]


def test_explained_shares_are_the_weights_at_the_maximum():
    rng = np.random.default_rng(6)
    text = sampled_text(rng, models(rng, 4), np.array([0.4, 0.3, 0.2, 0.1]))
    weights = mixmin_weights(text, unlimited(4))
    np.testing.assert_allclose(explained_shares(text, weights), weights, atol=2e-3)


@pytest.mark.parametrize("strength", [0.0, 0.1, 3.0, math.inf])
def test_a_domain_without_weight_is_as_if_left_out(strength):
    rng = np.random.default_rng(7)
    text = sampled_text(rng, models(rng, 4), np.array([0.4, 0.3, 0.2, 0.1]))
    limits = Limits(np.full(4, 0.25), np.zeros(4), np.array([1.0, 1.0, 1.0, 0.0]))
    fewer = TargetText(text.probabilities[:, :3], text.shares, text.documents, text.parts)
    expected = mixmin_weights(fewer, unlimited(3), strength * 0.75)
    found = mixmin_weights(text, limits, strength)
    np.testing.assert_allclose(found, [*expected, 0.0], atol=2e-3)


@pytest.mark.parametrize("strength", [0.0, 0.1, math.inf])
def test_a_prior_that_cannot_have_all_weight_leaves_the_rest_to_others(strength):
    rng = np.random.default_rng(8)
    text = sampled_text(rng, models(rng, 3), np.array([0.5, 0.3, 0.2]))
    limits = Limits(np.array([1.0, 0.0, 0.0]), np.zeros(3), np.full(3, 0.5))
    found = mixmin_weights(text, limits, strength)
    assert found.sum() == pytest.approx(1)
    assert found[0] == pytest.approx(0.5, abs=0.05)


def test_the_parts_of_a_target_keep_their_shares():
    """Two parts, each of one domain: resamples and folds do not change the weights of 1/2."""
    rng = np.random.default_rng(9)
    experts = models(rng, 3)
    one, other = (sampled_text(rng, experts, np.eye(3)[d], documents=10) for d in (0, 1))
    text = TargetText(
        np.concatenate([one.probabilities, other.probabilities]),
        np.concatenate([one.shares, other.shares]) / 2,
        np.concatenate([one.documents, other.documents + 10]),
        np.repeat([0, 1], 10),
    )
    found = mixmin_weights(text, unlimited(3))
    resampled = bootstrap_mixmin(text, unlimited(3), 0.0, found, 50)
    assert resampled.std(axis=0).max() < 0.03
    folds = document_folds(text, 5)
    assert [np.bincount(folds[text.parts == part]).tolist() for part in (0, 1)] == [[2] * 5] * 2
