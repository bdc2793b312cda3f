"""The same run twice is the same to the last bit."""

from __future__ import annotations

import pytest

from tests.distributed.layout_cases import SAVE_INTERVAL, TRAIN_ITERS


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_metrics_are_identical(results, name):
    assert results.metrics(f"{name}-again") == results.metrics(name)


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_checkpoints_are_identical(results, name):
    """Every byte of weights and moments: a checkpoint's hash is made from them."""
    for step in (SAVE_INTERVAL, TRAIN_ITERS):
        assert results.checkpoint(f"{name}-again", step).hash == results.checkpoint(name, step).hash


def test_a_checkpoint_of_another_step_has_another_hash(results):
    earlier, later = (results.checkpoint("one", step) for step in (SAVE_INTERVAL, TRAIN_ITERS))
    assert earlier.hash != later.hash
