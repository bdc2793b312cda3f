"""Chameleon weights, next to the paper's tables and the definition."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    affinity_matrix,
    chameleon_weights,
    domain_weights,
)
from megatron_chameleon.mixture.leverage import leverage_scores_direct

seeds = st.integers(0, 2**32 - 1)

# Printed in the paper: Table of SlimPajama weights, Pile weights (which sum to 1.0171), and the
# fine-tuning weights of Wiki40b and Stack.
SLIMPAJAMA = [0.083, 0.164, 0.202, 0.247, 0.082, 0.149, 0.073]
PILE = [0.0386, 0.0538, 0.0085, 0.0048, 0.0147, 0.0099, 0.0115, 0.0637, 0.0424]
PILE += [0.0226, 0.4519, 0.0104, 0.1207, 0.0226, 0.0123, 0.0212, 0.1075]
WIKI40B = [0.115, 0.163, 0.127, 0.109, 0.090, 0.140, 0.257]
STACK = [0.125, 0.129, 0.102, 0.088, 0.241, 0.118, 0.197]


def scores_behind(column: list[float], mode: str, temperature: float) -> np.ndarray:
    """The normalised scores that give a printed column; the column fixes them all.

    z = tau * ln(alpha) + c, where c makes the scores add up to 1.
    """
    z = temperature * np.log(np.array(column) / sum(column))
    if mode == "finetune":
        return z + (1 - z.sum()) / len(z)
    start = -z.min() + 1e-9
    return 1 / (z + brentq(lambda c: (1 / (z + c)).sum() - 1, start, start + 1e6))


def centred_domains_with_norms(squared_norms: np.ndarray, width: int) -> np.ndarray:
    """Embeddings [k, width] with zero mean and the given squared norms, by alternation."""
    embeddings = np.random.default_rng(0).normal(size=(len(squared_norms), width))
    for _ in range(500):
        embeddings -= embeddings.mean(axis=0)
        embeddings *= np.sqrt(squared_norms / np.square(embeddings).sum(axis=1))[:, None]
    return embeddings


@pytest.mark.parametrize(
    ("column", "mode"),
    [(SLIMPAJAMA, "pretrain"), (PILE, "pretrain"), (WIKI40B, "finetune"), (STACK, "finetune")],
)
def test_the_reference_recipe_reaches_the_printed_tables(column, mode):
    temperature = 5.0 if mode == "pretrain" else 0.2
    scores = scores_behind(column, mode, temperature)
    assert scores.min() > 0
    # Centred scores cannot exceed 1 - 1/k; these stay in an ordinary range around the mean 1/k.
    assert scores.min() * len(column) > 0.35
    assert scores.max() * len(column) < 2.0
    # Small against k * ridge, around a large common mean as hidden states have.
    embeddings = centred_domains_with_norms(scores, 64) * 0.1 + 3.0
    weights = chameleon_weights(embeddings, mode, "reference").weights
    np.testing.assert_allclose(weights, np.array(column) / sum(column), atol=2e-3)


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("k", [1, 7, 30])
def test_the_steps_are_those_of_the_recipe(recipe, mode, k):
    embeddings = np.random.default_rng(k).normal(size=(k, 16)) + 1.0
    result = chameleon_weights(embeddings, mode, recipe)
    settings_ = RECIPES[recipe]
    affinity = affinity_matrix(embeddings, settings_.center)
    np.testing.assert_allclose(result.affinity, affinity)
    np.testing.assert_allclose(
        result.scores, leverage_scores_direct(affinity, result.effective_ridge), atol=1e-10
    )
    expected = domain_weights(
        result.scores,
        mode,
        result.effective_temperature,
        settings_.normalize,
        score_floor=settings_.score_floor,
        score_ceiling=settings_.score_ceiling,
    )
    np.testing.assert_array_equal(result.weights, expected)
    if k == 1:
        np.testing.assert_array_equal(result.weights, [1.0])
        assert result.degenerate == ()


def test_scaled_equals_the_reference_at_seven_domains_and_the_same_ridge():
    embeddings = np.random.default_rng(7).normal(size=(7, 256)) * 0.3 + 2.0
    for mode in ("pretrain", "finetune"):
        scaled = chameleon_weights(embeddings, mode, "scaled", score_floor=1e-10)
        reference = chameleon_weights(embeddings, mode, ridge=scaled.effective_ridge)
        np.testing.assert_allclose(scaled.weights, reference.weights, rtol=1e-12)
    eigenvalues = np.linalg.eigvalsh(affinity_matrix(embeddings, center=True))
    np.testing.assert_allclose(scaled.effective_ridge, 0.1 * eigenvalues.mean())


@settings(deadline=None, max_examples=25)
@given(seeds, st.integers(2, 40), st.floats(1e-6, 1e6), st.sampled_from(["pretrain", "finetune"]))
def test_scaled_does_not_depend_on_the_units(seed, k, factor, mode):
    embeddings = np.random.default_rng(seed).normal(size=(k, 12)) + 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        expected = chameleon_weights(embeddings, mode, "scaled").weights
        weights = chameleon_weights(embeddings * factor, mode, "scaled").weights
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::megatron_chameleon.mixture.DegenerateScoreWarning")
@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_scaled_stays_spread_over_three_thousand_domains(mode):
    rng = np.random.default_rng(11)
    spectrum, tails = np.arange(1, 129) ** -0.75, np.exp(rng.normal(size=(3000, 1)))
    weights = chameleon_weights(rng.normal(size=(3000, 128)) * spectrum * tails, mode, "scaled")
    assert 1.5 / 3000 < weights.weights.max() < 0.02


@settings(deadline=None, max_examples=20)
@given(seeds, st.sampled_from(sorted(RECIPES)), st.sampled_from(["pretrain", "finetune"]))
def test_rotation_changes_nothing_and_permutation_carries_over(seed, recipe, mode):
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(8, 10)) + rng.normal(size=10)
    rotation = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    order = rng.permutation(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        weights = chameleon_weights(embeddings, mode, recipe).weights
        rotated = chameleon_weights(embeddings @ rotation, mode, recipe).weights
        permuted = chameleon_weights(embeddings[order], mode, recipe).weights
    np.testing.assert_allclose(rotated, weights, atol=1e-9)
    np.testing.assert_allclose(permuted, weights[order], atol=1e-9)


@pytest.mark.parametrize("recipe", ["reference", "scaled"])
def test_identical_domains_are_uniform_with_a_warning(recipe):
    embeddings = np.tile(np.random.default_rng(0).normal(size=33) * 1e3, (6, 1))
    for mode in ("pretrain", "finetune"):
        with pytest.warns(DegenerateScoreWarning, match="position 0, 1, 2, 3, 4, 5"):
            result = chameleon_weights(embeddings, mode, recipe)
        np.testing.assert_array_equal(result.weights, np.full(6, 1 / 6))
        assert result.degenerate == (0, 1, 2, 3, 4, 5)
