from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture import correlations, nearest_rows, similarity
from megatron_chameleon.mixture.similarity import unit_rows


def test_correlations_are_cosines():
    features = np.random.default_rng(0).normal(size=(6, 4))
    found = correlations(features)
    for i, one in enumerate(features):
        for j, other in enumerate(features):
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert found[i, j] == pytest.approx(cosine)
    assert np.abs(found).max() <= 1


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_rows_of_any_size_and_of_zeros(scale):
    units = unit_rows(scale * np.array([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(units, [[0.6, 0.8], [0.0, 0.0]])


@pytest.mark.parametrize("block", [1, 3, 1024])
def test_the_nearest_are_those_of_the_largest_cosines(monkeypatch, block):
    monkeypatch.setattr(similarity, "BLOCK_ROWS", block)
    features = np.random.default_rng(1).normal(size=(8, 5))
    positions, cosines = nearest_rows(features, 3)
    whole = correlations(features)
    for i in range(8):
        others = sorted((j for j in range(8) if j != i), key=lambda j: -whole[i, j])
        assert positions[i].tolist() == others[:3]
        np.testing.assert_allclose(cosines[i], whole[i, others[:3]])


def test_some_rows_alone_have_the_same_neighbours():
    features = np.random.default_rng(2).normal(size=(8, 5))
    rows = np.array([6, 1, 3])
    positions, cosines = nearest_rows(features, 2, rows)
    whole = nearest_rows(features, 2)
    np.testing.assert_array_equal(positions, whole[0][rows])
    np.testing.assert_allclose(cosines, whole[1][rows])


@pytest.mark.parametrize(("rows", "count", "found"), [(1, 2, 0), (2, 2, 1), (3, 0, 0)])
def test_there_may_be_fewer_others(rows, count, found):
    positions, cosines = nearest_rows(np.eye(3)[:rows], count)
    assert positions.shape == cosines.shape == (rows, found)
