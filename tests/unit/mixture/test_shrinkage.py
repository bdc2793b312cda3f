"""Shrinkage of Chameleon's weights, compared with the definition."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture import affinity_matrix, chameleon_weights
from megatron_chameleon.mixture.shrinkage import (
    effective_directions,
    shrinkage_factor,
    shrunk_weights,
)


@pytest.mark.parametrize(("k", "h"), [(8, 64), (5, 3), (40, 7)])
def test_directions_are_a_ratio_of_traces_of_the_leverage_matrix(k, h):
    embeddings = np.random.default_rng(k).normal(size=(k, h)) + 5.0
    affinity = affinity_matrix(embeddings, center=True)
    leverage = affinity @ np.linalg.inv(affinity + 0.01 * np.trace(affinity) * np.eye(k))
    expected = np.trace(leverage) ** 2 / np.trace(leverage @ leverage)
    assert effective_directions(embeddings) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-150, 1e-3, 0.1, 10.0, 1e150])
def test_the_scale_of_the_embeddings_does_not_change_the_directions(scale):
    embeddings = np.random.default_rng(1).normal(size=(7, 16)) * 0.8 ** np.arange(16)
    expected = effective_directions(embeddings)
    assert effective_directions(scale * embeddings) == pytest.approx(expected, rel=1e-12)


def test_equal_embeddings_have_no_direction():
    assert effective_directions(np.ones((5, 3))) == 0.0


def test_domains_on_a_line_get_uniform_weights_and_distinct_domains_keep_theirs():
    line = np.outer([0.0, 1, 2, 3, 4, 5, 6, 40], np.ones(16)) + 3.0
    assert effective_directions(line) == pytest.approx(1.0)
    assert shrinkage_factor(1.0, 8) == 0.0
    plain = chameleon_weights(line, "pretrain").weights
    assert plain.max() > 0.9
    np.testing.assert_allclose(shrunk_weights(plain, 0.0), np.full(8, 1 / 8), rtol=1e-12)
    distinct = np.diag(np.arange(8, 16.0))
    directions = effective_directions(distinct)
    assert directions > 6
    factor = shrinkage_factor(directions, 8)
    weights = chameleon_weights(distinct, "pretrain").weights
    assert factor == 1.0
    assert (shrunk_weights(weights, factor) == weights).all()


@pytest.mark.parametrize("k", [2, 3, 5, 8, 100])
def test_the_factor_rises_from_0_to_1_with_the_directions(k):
    factors = [shrinkage_factor(r, k) for r in np.linspace(1, k - 1, 200)]
    assert factors == sorted(factors)
    assert factors[-1] == 1.0
    assert factors[0] == (1.0 if k == 2 else 0.0)


def test_log_ratios_are_multiplied_and_a_prior_replaces_uniform():
    weights = np.array([0.9, 0.09, 0.01, 0.0])
    shrunk = shrunk_weights(weights, 0.25)
    assert shrunk.sum() == pytest.approx(1)
    assert np.log(shrunk[0] / shrunk[1]) == pytest.approx(0.25 * np.log(10))
    assert 0 < shrunk[3] < shrunk[2]
    prior = np.array([2.0, 1.0, 0.5, 0.5])
    np.testing.assert_allclose(shrunk_weights(weights, 0.0, prior), prior / 4, rtol=1e-12)
