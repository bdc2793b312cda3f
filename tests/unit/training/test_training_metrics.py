from __future__ import annotations

import math
import mmap

import pytest
import torch

from megatron_chameleon.training.metrics import IntervalMeter, memory_bytes
from megatron_chameleon.training.step import StepResult


def sums(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_an_interval_adds_up_its_steps(one_rank):
    meter = IntervalMeter(["a", "b", "c"], one_rank)
    meter.add(StepResult(sums([6.0, 2, 3], [0, 0, 0], [12.0, 2, 2]), grad_norm=0.5))
    meter.add(StepResult(sums([4.0, 2, 3], [0, 0, 0], [2.0, 2, 2]), grad_norm=0.25))
    interval = meter.read()
    assert interval.loss == pytest.approx(24 / 8)
    # A domain without tokens has no loss, and none is made up.
    assert interval.domain_loss == pytest.approx({"a": 10 / 4, "c": 14 / 4})
    assert interval.domain_tokens == {"a": 4, "c": 4}
    assert interval.domain_tokens_drawn == {"a": 6, "c": 4}
    assert interval.grad_norm == 0.25
    assert interval.tokens_per_second > 0


def test_a_loss_that_is_no_number_stays_one(one_rank):
    meter = IntervalMeter(["a", "b"], one_rank)
    meter.add(StepResult(sums([math.nan, 2, 2], [3.0, 1, 1]), grad_norm=0.5))
    interval = meter.read()
    assert math.isnan(interval.loss)
    assert interval.domain_loss["b"] == 3.0


def test_an_interval_without_a_token_to_learn_from_has_no_loss(one_rank):
    meter = IntervalMeter(["a"], one_rank)
    meter.add(StepResult(sums([0.0, 0, 8]), grad_norm=0.0))
    interval = meter.read()
    assert math.isnan(interval.loss)
    assert interval.domain_tokens_drawn == {"a": 8}


def test_a_skipped_step_counts_its_tokens_alone(one_rank):
    meter = IntervalMeter(["a", "b"], one_rank)
    meter.add(StepResult(sums([6.0, 2, 2], [3.0, 1, 1]), grad_norm=0.5))
    bad = StepResult(sums([math.nan, 2, 2], [3.0, 1, 4]), grad_norm=math.inf, skipped=True)
    meter.add(bad)
    assert meter.domain_losses(bad.domain_sums) == {
        "a": pytest.approx(math.nan, nan_ok=True),
        "b": 3.0,
    }
    interval = meter.read()
    assert (interval.loss, interval.grad_norm) == (3.0, 0.5)
    assert interval.domain_tokens == {"a": 2, "b": 1}
    assert interval.domain_tokens_drawn == {"a": 4, "b": 5}


def test_an_interval_of_skipped_steps_has_no_loss_and_no_norm(one_rank):
    meter = IntervalMeter(["a"], one_rank)
    meter.add(StepResult(sums([9.0, 2, 2]), grad_norm=7.0, skipped=True))
    interval = meter.read()
    assert math.isnan(interval.loss)
    assert math.isnan(interval.grad_norm)
    assert interval.domain_tokens_drawn == {"a": 2}


def test_the_memory_is_that_of_this_process():
    before = memory_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 32 << 20) as kept:  # of its own, not what was freed before
        kept.write(b"1" * (32 << 20))
        assert 24 << 20 < memory_bytes(torch.device("cpu")) - before < 256 << 20
