from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture import bootstrap_weights
from megatron_chameleon.mixture.precision import (
    is_one_hot,
    is_within_noise_of_uniform,
    outweighing_probability,
    windows_needed,
)
from megatron_chameleon.mixture.uncertainty import BootstrapResult


def resampled(weights, num_windows=(8, 4)):
    rows = np.array(weights, dtype=np.float64)
    low, high = np.quantile(rows, [0.025, 0.975], axis=0)
    return BootstrapResult(rows, low, high, 0.95, tuple(num_windows))


def test_who_outweighs_whom_is_counted_over_resamples():
    found = resampled([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5], [0.2, 0.8]])
    np.testing.assert_allclose(outweighing_probability(found, [0, 1], [1, 0]), [0.625, 0.375])


def test_each_pair_is_counted_by_itself():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), 200)
    one, other = np.triu_indices(5, 1)
    found = outweighing_probability(resampled(weights), one, other)
    for i, j, likely in zip(one, other, found, strict=True):
        assert likely == (weights[:, i] > weights[:, j]).mean()


def test_a_domain_alone_outweighs_nobody():
    assert outweighing_probability(resampled([[1.0], [1.0]]), [], []).shape == (0,)


def shares(embeddings):
    unnormalized = np.exp(embeddings.mean(axis=1))
    return unnormalized / unnormalized.sum()


def half_width(found):
    return float((found.high - found.low).max()) / 2


def test_with_the_windows_that_it_asks_for_the_intervals_are_as_narrow():
    rng = np.random.default_rng(0)
    population = [rng.normal(size=(20_000, 4)) + i / 3 for i in range(3)]
    few = bootstrap_weights([rows[:100] for rows in population], shares, 400)
    wanted = half_width(few) / 3
    needed = windows_needed(half_width(few), 100, wanted)
    assert needed == pytest.approx(900, abs=1)
    enough = bootstrap_weights([rows[:needed] for rows in population], shares, 400)
    assert half_width(enough) == pytest.approx(wanted, rel=0.2)


def test_a_precision_is_a_number_above_zero():
    with pytest.raises(ValueError, match="precision is 0"):
        windows_needed(0.1, 100, 0.0)


@pytest.mark.parametrize(
    ("weights", "uniform", "one_hot"),
    [
        ([[0.45, 0.55], [0.55, 0.45]], True, False),
        ([[0.6, 0.4], [0.7, 0.3]], False, False),
        ([[0.99, 0.01], [0.98, 0.02]], False, True),
        ([[1.0], [1.0]], True, False),
    ],
)
def test_weights_that_say_little_are_known(weights, uniform, one_hot):
    assert is_within_noise_of_uniform(resampled(weights)) is uniform
    assert is_one_hot(resampled(weights)) is one_hot
