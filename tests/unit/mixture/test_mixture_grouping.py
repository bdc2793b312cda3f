from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture import group_size, grouped_windows
from megatron_chameleon.mixture.grouping import FEWEST_GROUPS, MAX_VALUES


def windows_of(n: int, h: int = 5, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, h)) + 10).astype(np.float32)


@pytest.mark.parametrize(("domains", "windows"), [(7, 4096), (85, 4096), (1, 349_000), (5000, 32)])
def test_what_fits_is_not_grouped(domains, windows):
    assert group_size(domains, windows, 768) == 1
    vectors = windows_of(50)
    assert grouped_windows(vectors, 1, seed=0) is vectors


@pytest.mark.parametrize("domains", [100, 1000, 5000, 8000])
def test_the_groups_of_many_domains_fit(domains):
    size = group_size(domains, 4096, 768)
    assert size > 1
    assert domains * (4096 // size) * 768 <= MAX_VALUES


def test_each_window_is_in_one_group_and_the_mean_is_that_of_all():
    vectors = windows_of(100, seed=1)
    groups = grouped_windows(vectors, 3, seed=2)
    assert groups.shape == (33, 5)
    assert groups.dtype == np.float32
    mean, expected = (array.mean(axis=0, dtype=np.float64) for array in (groups, vectors))
    rounding = np.finfo(np.float32).eps * np.abs(groups).max()  # that of each group's mean
    np.testing.assert_allclose(mean, expected, rtol=0, atol=rounding)
    order = np.random.default_rng([2, 100]).permutation(100)[:99].reshape(33, 3)
    plain = np.stack([vectors[rows].mean(axis=0) for rows in order])
    shift = vectors.mean(axis=0) - plain.mean(axis=0)
    np.testing.assert_allclose(groups, plain + shift, rtol=1e-5)
    np.testing.assert_array_equal(groups, grouped_windows(vectors, 3, seed=2))
    assert not np.array_equal(groups, grouped_windows(vectors, 3, seed=3))


@pytest.mark.parametrize("windows", [1, 31, 40, 64, 200])
def test_few_windows_are_grouped_less(windows):
    groups = grouped_windows(windows_of(windows), 100, seed=0)
    assert len(groups) >= min(windows, FEWEST_GROUPS)


def test_the_mean_of_groups_is_as_sure_as_that_of_windows():
    """Over many domains: variance of a mean estimated from groups and from windows."""
    ratios = []
    for seed in range(200):
        vectors = windows_of(512, h=8, seed=seed)
        groups = grouped_windows(vectors, 8, seed)
        by_groups = groups.var(axis=0, ddof=1) / len(groups)
        ratios.append(by_groups / (vectors.var(axis=0, ddof=1) / len(vectors)))
    assert np.mean(ratios) == pytest.approx(1, abs=0.02)
