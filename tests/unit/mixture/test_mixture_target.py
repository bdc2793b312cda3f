from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    affinity_matrix,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
    domain_weights,
    similarity_shares,
    target_prior,
)
from megatron_chameleon.mixture.target import scaled_prior

seeds = st.integers(0, 2**32 - 1)
recipes = st.sampled_from(["paper", "reference", "scaled"])
modes = st.sampled_from(["pretrain", "finetune"])


def weigh(embeddings, mode, recipe, prior=None, **overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(embeddings, mode, recipe, prior=prior, **overrides)


def problem(seed: int, most_domains: int = 9, most_features: int = 14):
    """Embeddings [k, h] of any scale, priors [k], and a generator."""
    rng = np.random.default_rng(seed)
    k, h = rng.integers(2, most_domains), rng.integers(1, most_features)
    embeddings = rng.normal(size=(k, h)) * 10 ** rng.uniform(-1, 2) + rng.normal(size=h)
    return embeddings, rng.uniform(0.1, 3.0, k), rng


def scores_by_definition(affinity, prior, ridge):
    """diag(K (K + k lambda diag(eta)^-1)^-1), as in the paper's appendix: the plain reference."""
    k = len(affinity)
    return np.diagonal(affinity @ np.linalg.inv(affinity + k * ridge * np.diag(1 / prior)))


@given(seeds, recipes, modes)
def test_scores_and_weights_are_those_of_the_definition(seed, recipe, mode):
    embeddings, prior, _ = problem(seed)
    result = weigh(embeddings, mode, recipe, prior, score_floor=1e-10, score_ceiling=np.inf)
    eta = prior / prior.mean()
    affinity = affinity_matrix(embeddings, result.recipe.center)
    expected = scores_by_definition(affinity, eta, result.effective_ridge)
    np.testing.assert_allclose(result.scores, expected, atol=1e-8)
    np.testing.assert_allclose(result.prior, eta, rtol=1e-12)
    shares = result.scores / result.scores.sum() if result.recipe.normalize else result.scores
    z = eta / shares if mode == "pretrain" else shares
    odds = np.exp((z - z.max()) / result.effective_temperature)
    np.testing.assert_allclose(result.weights, odds / odds.sum(), rtol=1e-7, atol=1e-9)


def christoffel(affinity, prior, ridge, i):
    """min_g sum_j eta_j / k g(x_j)^2 + lambda |g|^2 with g(x_i) = 1, for g = sum_j a_j K(x_j, .).

    Over a, by its Lagrangian: the minimum is 1 / (K_i Q^-1 K_i) with Q the quadratic form.
    """
    k = len(affinity)
    quadratic = affinity @ np.diag(prior / k) @ affinity + ridge * affinity
    solved = np.linalg.solve(quadratic, affinity[i])
    return 1 / (affinity[i] @ solved)


@given(seeds)
def test_pretraining_takes_the_christoffel_function(seed):
    """The variational problem itself, where K has full rank."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 6))
    embeddings, prior = rng.normal(size=(k, 3 * k)), rng.uniform(0.2, 3, k)
    prior /= prior.mean()
    result = weigh(embeddings, "pretrain", "paper", prior, ridge=0.3)
    values = [k * christoffel(result.affinity, prior, 0.3, i) for i in range(k)]
    np.testing.assert_allclose(prior / result.scores, values, rtol=1e-6)


@given(seeds, recipes, modes, st.floats(1e-300, 1e300))
def test_equal_priors_give_the_plain_weights_to_the_bit(seed, recipe, mode, value):
    embeddings, _, _ = problem(seed)
    plain = weigh(embeddings, mode, recipe)
    same = weigh(embeddings, mode, recipe, np.full(len(embeddings), value))
    assert same.prior is None
    np.testing.assert_array_equal(same.weights, plain.weights)
    np.testing.assert_array_equal(same.scores, plain.scores)
    assert same.degenerate == plain.degenerate


@given(seeds, recipes, modes)
def test_nearly_equal_priors_give_nearly_the_plain_weights(seed, recipe, mode):
    embeddings, _, rng = problem(seed)
    nearly = 1 + 1e-9 * rng.normal(size=len(embeddings))
    plain = weigh(embeddings, mode, recipe, ridge=1.0).weights
    np.testing.assert_allclose(
        weigh(embeddings, mode, recipe, nearly, ridge=1.0).weights, plain, atol=1e-3
    )


@given(seeds, recipes, modes)
def test_the_order_of_the_domains_carries_over(seed, recipe, mode):
    embeddings, prior, rng = problem(seed, most_domains=7, most_features=30)
    order = rng.permutation(len(embeddings))
    weights = weigh(embeddings, mode, recipe, prior, ridge=1.0).weights
    permuted = weigh(embeddings[order], mode, recipe, prior[order], ridge=1.0).weights
    np.testing.assert_allclose(permuted, weights[order], atol=1e-7)


@given(seeds, recipes, modes, st.floats(1e-6, 1e6))
def test_the_scale_of_a_prior_means_nothing(seed, recipe, mode, factor):
    embeddings, prior, _ = problem(seed, most_domains=7, most_features=30)
    weights = weigh(embeddings, mode, recipe, prior, ridge=1.0).weights
    scaled = weigh(embeddings, mode, recipe, factor * prior, ridge=1.0).weights
    np.testing.assert_allclose(scaled, weights, atol=1e-7)


@given(seeds, st.floats(1.0, 20.0))
def test_in_fine_tuning_more_prior_never_lowers_a_score_nor_raises_another(seed, factor):
    embeddings, prior, rng = problem(seed)
    one = int(rng.integers(len(prior)))
    more = np.where(np.arange(len(prior)) == one, factor * prior, prior)
    before = weigh(embeddings, "finetune", "paper", prior)
    after = weigh(embeddings, "finetune", "paper", more)
    change = after.scores - before.scores
    assert change[one] >= -1e-9
    assert (np.delete(change, one) <= 1e-9).all()
    assert after.weights[one] >= before.weights[one] - 1e-9  # scores are not normalised here


@given(seeds, st.floats(0.1, 5.0))
def test_in_pretraining_the_prior_adds_to_what_the_others_say(seed, added):
    """eta_i / S_i = eta_i + 1 / q_i: raised by as much as eta_i is, the other priors held."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 7))
    affinity = affinity_matrix(rng.normal(size=(k, 5)), center=False)
    prior, one = rng.uniform(0.2, 3, k), int(rng.integers(k))
    more = prior + added * (np.arange(k) == one)
    before = prior / scores_by_definition(affinity, prior, 0.5)
    after = more / scores_by_definition(affinity, more, 0.5)
    assert after[one] - before[one] == pytest.approx(added, rel=1e-6)
    assert (after >= before - 1e-9).all()


def test_in_pretraining_more_prior_can_mean_less_weight():
    """x_1 is a tenth of x_0: what holds g(x_1) at 1 makes g(x_0) 10, so eta_0 lifts z_1 by 100."""
    embeddings = np.array([[10.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    weights = [
        weigh(embeddings, "pretrain", "paper", prior, ridge=0.1).weights[0]
        for prior in ([1.0, 1.0, 1.0], [1.5, 1.0, 1.0])
    ]
    assert weights[1] < weights[0]


@pytest.mark.parametrize(("mode", "ridge"), [("pretrain", 1e-3), ("finetune", 1e3)])
def test_a_target_draws_weight_where_the_ridge_lets_it(mode, ridge):
    embeddings = np.random.default_rng(1).normal(size=(7, 64))
    prior = target_prior(np.arange(7) == 2, 0.5)
    plain = weigh(embeddings, mode, "reference", ridge=ridge).weights
    drawn = weigh(embeddings, mode, "reference", prior, ridge=ridge).weights
    assert drawn[2] > plain[2] + 0.2


def test_a_large_ridge_forgets_it_in_pretraining_and_a_small_one_in_fine_tuning():
    embeddings = np.random.default_rng(1).normal(size=(7, 64))
    prior = target_prior(np.arange(7) == 2, 0.5)
    plain = weigh(embeddings, "pretrain", "paper", ridge=1e5).scores
    drawn = weigh(embeddings, "pretrain", "paper", prior, ridge=1e5).scores
    np.testing.assert_allclose(prior / drawn, 1 / plain, rtol=1e-3)
    drawn = weigh(embeddings, "finetune", "paper", prior, ridge=1e-5).scores
    np.testing.assert_allclose(drawn, 1, atol=1e-3)
    centred = weigh(embeddings, "finetune", "reference", prior, ridge=1e-5).scores
    np.testing.assert_allclose(centred, 1 - (1 / prior) / (1 / prior).sum(), atol=1e-3)


def test_more_domains_than_features_uses_the_same_scores():
    embeddings = np.random.default_rng(2).normal(size=(40, 4)) * 3
    prior = np.random.default_rng(3).uniform(0.1, 4, 40)
    result = weigh(embeddings, "finetune", "paper", prior)
    expected = scores_by_definition(embeddings @ embeddings.T, prior / prior.mean(), 10.0)
    np.testing.assert_allclose(result.scores, expected, atol=1e-10)


def test_the_limits_hold_what_is_inverted():
    scores, prior = np.array([0.5, 0.5, 0.5, 0.5]), np.array([3.7, 0.1, 0.1, 0.1])
    limits: dict[str, Any] = {"score_floor": 0.5, "score_ceiling": 4.0, "prior": prior}
    with pytest.warns(
        DegenerateScoreWarning, match="position 0 .* and above 4 .* position 1, 2, 3"
    ):
        weights = domain_weights(scores, "pretrain", 1.0, True, **limits)
    # S / eta is held at 0.5 and 4 times the mean of S, and z = 4 / 0.5 or 4 / 4.
    np.testing.assert_allclose(weights[0] / weights[1], np.exp(8.0 - 1.0))


def test_the_bootstrap_takes_the_prior_from_each_resample():
    rng = np.random.default_rng(4)
    centers = rng.normal(size=(4, 8))
    windows = [center + rng.normal(size=(30, 8)) for center in centers]
    text = centers[1] + 0.5

    def prior(means):
        return target_prior(similarity_shares(means, text))

    resampled = bootstrap_weights(windows, chameleon_weight_fn("finetune", prior=prior), 50)
    means = np.stack([rows.mean(axis=0) for rows in windows])
    whole = chameleon_weights(means, "finetune", prior=prior(means)).weights
    plain = chameleon_weights(means, "finetune").weights
    assert np.abs(whole - plain).max() > 0.02
    assert ((resampled.low <= whole) & (whole <= resampled.high)).all()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0.01, 0.99))
def test_a_prior_mixes_the_target_with_all_alike(shares, strength):
    shares[0] = 1.0
    prior = target_prior(shares, strength)
    expected = 1 - strength + strength * len(shares) * np.array(shares) / np.sum(shares)
    np.testing.assert_allclose(prior, expected, rtol=1e-9)
    assert prior.mean() == pytest.approx(1, rel=1e-9)
    assert prior.min() > 0
    if len(set(shares)) == 1:
        assert (prior == 1).all()


def test_a_text_counts_the_domains_in_whose_direction_it_lies():
    rng = np.random.default_rng(5)
    mean = 100 * rng.normal(size=32)
    embeddings = mean + rng.normal(size=(6, 32))
    centered = embeddings - embeddings.mean(axis=0)
    text = embeddings.mean(axis=0) + 0.3 * centered[4] + 0.05 * rng.normal(size=32)
    shares = similarity_shares(embeddings, text)
    direction = text - embeddings.mean(axis=0)
    for share, row in zip(shares, centered, strict=True):
        cosine = row @ direction / np.linalg.norm(row) / np.linalg.norm(direction)
        assert share == pytest.approx(max(0.0, cosine) ** 2)
    assert shares.argmax() == 4
    assert shares[4] > 0.6 > 3 * np.delete(shares, 4).max()
    far = embeddings.mean(axis=0) + 50 * direction  # how far out it lies means nothing
    np.testing.assert_allclose(similarity_shares(embeddings, far), shares, atol=1e-9)


@pytest.mark.parametrize("text", [[2.0, 2.0, 0.0], [2.0, 2.0, 7.0]])
def test_a_text_at_the_mean_or_unlike_all_counts_them_alike(text):
    embeddings = np.array([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0], [2.0, 2.0, 0.0]])
    np.testing.assert_array_equal(similarity_shares(embeddings, text), np.ones(3))


def test_identical_domains_and_a_single_one_count_alike():
    np.testing.assert_array_equal(similarity_shares(np.ones((3, 2)), [5.0, 1.0]), np.ones(3))
    np.testing.assert_array_equal(similarity_shares([[1.0, 2.0]], [5.0, 1.0]), np.ones(1))
    single = chameleon_weights([[1.0, 2.0]], "pretrain", prior=[3.0])
    np.testing.assert_array_equal(single.weights, [1.0])


@pytest.mark.parametrize(
    ("shares", "strength", "message"),
    [
        ([], 0.5, "shares must be a vector"),
        ([[1.0]], 0.5, "shares must be a vector"),
        ([1.0, np.nan], 0.5, "vector of finite numbers"),
        ([1.0, -1.0], 0.5, "must not be negative"),
        ([0.0, 0.0], 0.5, "nor all zero"),
        ([1.0, 2.0], 0.0, "strength is 0.0: it must lie between 0 and 1"),
        ([1.0, 2.0], 1.0, "strength is 1.0"),
    ],
)
def test_bad_shares_are_refused(shares, strength, message):
    with pytest.raises(ValueError, match=message):
        target_prior(shares, strength)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([1.0, 2.0], r"prior has shape \(2,\), but there are 3 domains"),
        ([1.0, 2.0, 0.0], "prior is 0.0: it must be a finite number above 0"),
        ([1.0, 2.0, np.nan], "prior is nan"),
        ([1.0, 2.0, np.inf], "prior is inf"),
    ],
)
def test_bad_priors_are_refused(prior, message):
    with pytest.raises(ValueError, match=message):
        scaled_prior(prior, 3)
    with pytest.raises(ValueError, match=message):
        chameleon_weights(np.eye(3), "pretrain", prior=prior)


def test_a_text_of_another_proxy_is_refused():
    with pytest.raises(ValueError, match="target has 2 features but the domains have 3"):
        similarity_shares(np.eye(3), [1.0, 2.0])
