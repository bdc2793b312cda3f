"""Aioli's rule: hand-computed steps, and losses that follow a known linear mixing law."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.aioli import (
    aioli_weights,
    mixing_matrix,
    normalized_gains,
    perturbed_mixture,
)


def test_one_round_by_hand():
    np.testing.assert_allclose(perturbed_mixture(1, 3, 0.5), [0.25, 0.5, 0.25])
    # A [0.75, 0.25] = [0.5, 0.25] and A [0.25, 0.75] = [0.5, 0.75]
    matrix = mixing_matrix(np.array([[0.5, 0.5], [0.25, 0.75]]), 0.75)
    np.testing.assert_allclose(matrix, [[0.5, 0.5], [0.0, 1.0]])
    np.testing.assert_allclose(normalized_gains(matrix), [0.25, 0.75])
    # The smallest entry, -1, is subtracted: [[2, 1], [0, 2]].
    np.testing.assert_allclose(normalized_gains(np.array([[1.0, 0], [-1, 1]])), [0.4, 0.6])
    np.testing.assert_allclose(normalized_gains(np.zeros((2, 2))), [0.5, 0.5])
    # One loss of a target; two losses with shares: 0.75 [1, 3] + 0.25 [2, 0].
    np.testing.assert_allclose(mixing_matrix(np.array([[0.5, 0.5]]), 0.75), [[0.5, 0.5]])
    shares = np.array([0.75, 0.25])
    found = normalized_gains(np.array([[1.0, 3], [2, 0]]), shares)
    np.testing.assert_allclose(found, [1.25 / 3.5, 2.25 / 3.5])
    np.testing.assert_allclose(normalized_gains(np.zeros((1, 2)), np.ones(1)), [0.5, 0.5])
    weights = aioli_weights(np.array([0.8, 0.2]), np.array([0.25, 0.75]), 2.0)
    expected = 0.2 * np.e / (0.8 + 0.2 * np.e)
    np.testing.assert_allclose(weights, [1 - expected, expected])


@pytest.mark.parametrize("emphasis", [0.5, 0.75, 1.0])
def test_a_linear_law_is_recovered_and_followed(emphasis):
    """Losses fall by A p per step: the estimate is A, and a step of the weights lowers the sum."""
    law = np.array(
        [[0.5, 0.1, 0.3, 0.0], [0.0, 0.2, 0.4, 0.0], [0.1, 0.0, 0.6, 0.0], [0, 0, 0.2, 0.1]]
    )
    losses, drops = np.full(4, 9.0), np.zeros((4, 4))
    for _sweep in range(2):
        for domain in (2, 0, 3, 1):
            after = losses - law @ perturbed_mixture(domain, 4, emphasis)
            drops[:, domain] += (losses - after) / 2
            losses = after
    np.testing.assert_allclose(mixing_matrix(drops, emphasis), law, atol=1e-12)
    gains = normalized_gains(mixing_matrix(drops, emphasis))
    np.testing.assert_allclose(gains, law.sum(0) / law.sum(), atol=1e-12)
    # The sum of losses falls by g p with g = law.sum(0), fastest for domain 2 alone.
    prior = np.full(4, 0.25)
    falls = [law.sum(0) @ aioli_weights(prior, gains, eta) for eta in (1e-9, 1, 10, 1000)]
    assert falls == sorted(falls)
    assert falls[-1] == pytest.approx(law.sum(0).max())
