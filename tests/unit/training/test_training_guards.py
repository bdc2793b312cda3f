"""Which steps are refused, and that a refused step changes nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
import torch

from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.guard import RollingBound, StepGuard
from megatron_chameleon.training.optimizer import build_optimizer, data_parallel, with_copies
from megatron_chameleon.training.options import GuardOptions, OptimizerOptions

SHAPE = ModelShape(ModelSize(1, 2, 16, 32), vocab_size=50, max_sequence_length=8)
BAD = (math.nan, math.inf, -math.inf)


def guard(state=None, **options):
    return StepGuard(GuardOptions(**options), state or {})


def judge_of(guard):
    """A function of a step's loss and norm: why it is skipped, or None."""
    return lambda *step: None if guard.accepts(*step) else guard.reason


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_refused_by_its_name(bad):
    judge = judge_of(guard())
    assert judge(bad, 1.0) == f"the loss is {bad}"
    assert judge(1.0, bad) == f"the gradient's norm is {bad}"
    assert judge(1.0, 1.0) is None


def test_a_step_without_a_loss_is_judged_by_its_gradient():
    judge = judge_of(guard(spike_factor=2.0, spike_window=4))
    assert judge(None, 0.0) is None
    assert judge(None, math.nan) == "the gradient's norm is nan"


def test_steps_are_counted():
    counts = guard()
    seen = []
    for loss in (1.0, math.nan, 1.0, math.nan, math.nan):
        counts.accepts(loss, 1.0)
        seen.append((counts.updates, counts.skipped))
    assert seen == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)]


def test_without_a_factor_nothing_is_a_spike():
    judge = judge_of(guard())
    assert [judge(10.0**power, 10.0**power) for power in range(30)] == [None] * 30


def test_a_spike_is_above_the_mean_by_so_many_deviations():
    values = [1.0, 2.0, 3.0, 2.0, 4.0]
    expected = statistics.fmean(values) + 3 * statistics.stdev(values)
    assert RollingBound(3.0, 8, values).bound() == pytest.approx(expected)
    judge = judge_of(guard({"loss": values, "grad_norm": values}, spike_factor=3.0, spike_window=8))
    assert judge(expected * 1.001, 2.0).startswith("the loss is ")
    assert judge(2.0, expected * 1.001).startswith("the gradient's norm is ")
    assert judge(expected * 0.999, expected * 0.999) is None


def test_there_is_no_bound_before_half_the_window_is_full():
    judge = judge_of(guard(spike_factor=1.0, spike_window=8))
    assert [judge(loss, 1.0) for loss in (1.0, 1.1, 50.0, 1.0)] == [None] * 4
    assert judge(200.0, 1.0) is not None


def test_the_bound_rolls_and_refused_values_do_not_move_it():
    bound = RollingBound(1.0, 3, [100.0, 1.0, 2.0, 3.0])
    assert bound.bound() == pytest.approx(3.0)
    judged = guard({"loss": [1.0, 2.0, 3.0]}, spike_factor=1.0, spike_window=3)
    assert not judged.accepts(9.0, 1.0)
    reason = judged.reason
    assert not judged.accepts(9.0, 1.0)
    assert judged.reason == reason


@pytest.mark.parametrize("cut", [7, 13, 16, 17])
def test_a_continued_guard_judges_as_if_it_had_never_stopped(cut):
    steps = [(math.sin(step) + (5 if step % 7 == 6 else 0), step // 16) for step in range(30)]
    whole = guard(spike_factor=2.0, spike_window=10)
    first = guard(spike_factor=2.0, spike_window=10)
    verdicts = [whole.accepts(loss, loss + 2, phase) for loss, phase in steps]
    before = [first.accepts(loss, loss + 2, phase) for loss, phase in steps[:cut]]
    second = guard(json.loads(json.dumps(first.state())), spike_factor=2.0, spike_window=10)
    after = [second.accepts(loss, loss + 2, phase) for loss, phase in steps[cut:]]
    assert before + after == verdicts
    assert second.state() == whole.state()
    assert 0 < whole.skipped < 10


def test_other_weights_of_the_domains_are_no_spike():
    """A loss that is higher for good, as of other domains, against one that comes and goes."""
    losses = [2.0, 2.02, 1.98, 2.01] * 4
    stays, changes = (guard(spike_factor=6.0, spike_window=8) for _ in range(2))
    for loss in losses:
        assert stays.accepts(loss, 1.0, 0) is changes.accepts(loss, 1.0, 0) is True
    assert not any(stays.accepts(loss + 0.3, 1.0, 0) for loss in losses)
    assert all(changes.accepts(loss + 0.3, 1.0, 128) for loss in losses)
    assert not changes.accepts(2.9, 1.0, 128)  # and there is a bound again


def test_a_checkpoint_that_says_no_phase_keeps_its_bounds():
    old = {"skipped": 0, "updates": 4, "loss": [1.0, 1.1, 1.2], "grad_norm": [1.0, 1.1, 1.2]}
    judge = judge_of(guard(old, spike_factor=1.0, spike_window=4))
    assert judge(9.0, 1.0, 640) is not None


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_a_refused_step_changes_neither_weights_nor_moments(one_rank, bf16, sharded, bad):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    chunks = data_parallel([build_model(SHAPE, layout, seed=0, bf16=bf16)], layout, bf16=bf16)
    options = OptimizerOptions(lr=1e-2, lr_warmup_iters=0)
    optimizer = build_optimizer(chunks, options, layout, bf16=bf16)
    asked = []

    def accepts(norm):
        asked.append(norm)
        return math.isfinite(norm)

    optimizer.accepts = accepts

    def step(value):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for parameter in chunks[0].parameters():
            parameter.main_grad.fill_(0.1)
        next(chunks[0].parameters()).main_grad.view(-1)[0] = value
        return optimizer.step()

    def everything():
        (part,) = optimizer.chained_optimizers
        moments = [v for state in part.optimizer.state.values() for v in state.values()]
        weights = [*chunks[0].parameters(), *part.get_parameters()]
        return [value.detach().clone() for value in [*weights, *moments]]

    assert step(0.2)[0]
    before = everything()
    updated, norm, _ = step(bad)
    assert not updated
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert step(0.2)[0]
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert len(asked) == 3


def gradients(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for size in sizes]


def test_copies_leave_the_norm_as_it_is_to_the_bit():
    counted, copies = gradients((64, 16), (16,), (48, 16)), gradients((16,), (5,))
    with_them = with_copies(counted, copies)
    assert torch.equal(
        torch.nn.utils.get_total_norm(with_them), torch.nn.utils.get_total_norm(counted)
    )
    assert torch.nn.utils.get_total_norm(with_copies([], copies)) == 0
    assert with_copies(counted, []) == counted


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("sizes", [((64, 16), (16,)), ()])
def test_a_copy_that_is_not_finite_makes_the_norm_nan(bad, sizes):
    counted, copies = gradients(*sizes), gradients((16,), (5,))
    before = [gradient.clone() for gradient in counted]
    copies[1][3] = bad
    assert torch.nn.utils.get_total_norm(with_copies(counted, copies)).isnan()
    assert all(map(torch.equal, counted, before))  # what clipping scales is as it was
