"""Runs that begin with a dry step are those that do not, to the bit."""

from __future__ import annotations

import pytest

from tests.distributed.layout_cases import RESUMED_DRY, RUNS_DRY, SAVE_INTERVAL, TRAIN_ITERS


@pytest.mark.parametrize("name", RUNS_DRY)
def test_a_new_run_is_the_same(results, name):
    origin = name.removesuffix("-dry")
    assert results.metrics(name) == results.metrics(origin)
    for step in (SAVE_INTERVAL, TRAIN_ITERS):  # random states included
        assert results.checkpoint(name, step).hash == results.checkpoint(origin, step).hash


@pytest.mark.parametrize("name", RESUMED_DRY)
def test_a_run_that_goes_on_is_the_same(results, name):
    origin = RESUMED_DRY[name]
    assert results.metrics(name) == results.metrics(origin)
    resumed, whole = (results.checkpoint(run, TRAIN_ITERS) for run in (name, origin))
    assert resumed.hash == whole.hash
