"""Predicted gains of an optimum, with intervals from cross-validation."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.methods.swarm.quality import cross_validated_gain


@pytest.mark.parametrize("count", [4, 6, 16, 64])
def test_intervals_contain_nine_of_ten_true_gains(count):
    rng, covered, trials = np.random.default_rng(count), 0, 2000
    for _ in range(trials):
        trained = rng.dirichlet(np.ones(4), count)
        errors = rng.normal(0, 0.1, count)
        compared = rng.dirichlet(np.ones(4), 2)
        error = rng.normal(0, 0.1, 2)
        found = cross_validated_gain(trained, errors, compared, 1.0 + error[1] - error[0])
        covered += found.low <= 1.0 <= found.high
    assert covered > 0.88 * trials


def test_only_errors_of_runs_near_the_compared_mixtures_count():
    corners = np.repeat(np.eye(3), 4, axis=0)
    errors = np.where(corners[:, 2] == 1, 100.0, 0.1)
    found = cross_validated_gain(corners, errors, np.eye(3)[:2] * 0.9 + 0.05, 1.0)
    assert found.low > 0
