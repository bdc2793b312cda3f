"""Test skipped steps, stop requests, and that ranks agree on both."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import statistics

import pytest
import torch

from megatron_chameleon.training.guard import StepGuard, StepSync
from megatron_chameleon.training.options import GuardOptions, StoppingOptions
from megatron_chameleon.training.stopping import REASONS, StopRequests

BAD = (math.nan, math.inf, -math.inf)


def make_guard(state=None, **options):
    guard = StepGuard(GuardOptions(**options))
    guard.load_state_dict(state or {})
    return guard


@pytest.mark.parametrize("bad", BAD)
def test_steps_with_nan_or_infinities_are_skipped_and_counted(bad):
    guard = make_guard()
    steps = [(1.0, 1.0), (bad, 1.0), (1.0, bad), (None, bad), (None, 0.0), (1e30, 1e30)]
    rejected = [guard.check(*step) is not None for step in steps]
    assert rejected == [False, True, True, True, False, False]
    assert (guard.updates, guard.skipped) == (3, 3)
    assert guard.check(bad, 1.0) == f"the loss is {bad}"


def test_spikes_are_above_the_mean_by_a_number_of_standard_deviations():
    values = [1.0, 2.0, 3.0, 2.0, 4.0]
    bound = statistics.fmean(values) + 3 * statistics.stdev(values)
    guard = make_guard({"loss": values, "grad_norm": values}, spike_factor=3.0, spike_window=8)
    assert guard.check(bound * 1.001, 2.0)
    assert guard.check(2.0, bound * 1.001)  # the previous spike is not in the window
    assert not guard.check(bound * 0.999, bound * 0.999)
    guard = make_guard(spike_factor=1.0, spike_window=8)
    assert not any(
        guard.check(loss, 1.0) for loss in (1.0, 1.1, 50.0, 1.0)
    )  # the window is less than half full
    assert guard.check(200.0, 1.0)


@pytest.mark.parametrize("cut", [7, 13, 16, 17])
def test_resumed_guard_decides_as_an_uninterrupted_one(cut):
    steps = [(math.sin(step) + (5 if step % 7 == 6 else 0), step // 16) for step in range(30)]
    whole, first = (make_guard(spike_factor=2.0, spike_window=10) for _ in range(2))
    expected = [whole.check(loss, loss + 2, phase) for loss, phase in steps]
    before = [first.check(loss, loss + 2, phase) for loss, phase in steps[:cut]]
    second = make_guard(
        json.loads(json.dumps(first.state_dict())), spike_factor=2.0, spike_window=10
    )
    after = [second.check(loss, loss + 2, phase) for loss, phase in steps[cut:]]
    assert before + after == expected
    assert second.state_dict() == whole.state_dict()
    assert 0 < whole.skipped < 10


def test_mixture_change_resets_the_spike_threshold():
    losses = [2.0, 2.02, 1.98, 2.01] * 4
    same, changed = (make_guard(spike_factor=6.0, spike_window=8) for _ in range(2))
    assert not any(guard.check(loss, 1.0, 0) for loss in losses for guard in (same, changed))
    assert all(same.check(loss + 0.3, 1.0, 0) for loss in losses)
    assert not any(changed.check(loss + 0.3, 1.0, 128) for loss in losses)
    assert changed.check(2.9, 1.0, 128)


def sums(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_ranks_agree_on_loss_and_stop_reasons(one_rank):
    sync, none = StepSync(one_rank, 3), [0.0] * len(REASONS)
    one = [float(reason == REASONS[1]) for reason in REASONS]
    sync.send(sums([6.0, 2, 3], [0, 0, 4], [9.0, 1, 1]), one)
    assert (sync.loss(), sync.stop_reasons()) == (5.0, [REASONS[1]])
    assert sync.domain_losses().tolist() == [[6.0, 0.0, 9.0], [2.0, 0.0, 1.0]]
    sync = StepSync(one_rank, 1)
    sync.send(sums([0.0, 0, 8]), none)
    assert (sync.loss(), sync.stop_reasons()) == (None, [])
    sync = StepSync(one_rank, 2)
    sync.send(sums([6.0, 2, 2], [math.nan, 1, 1]), none)
    assert math.isnan(sync.loss() or 0.0)
    # Losses of this tensor-parallel rank repeat those of the first, so they are not counted.
    sync = StepSync(dataclasses.replace(one_rank, tensor_rank=1), 1)
    first_and_last = [1.0, *none[2:], 1.0]
    sync.send(sums([6.0, 2, 2]), first_and_last)
    assert (sync.loss(), sync.stop_reasons()) == (None, [REASONS[0], REASONS[-1]])


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def reasons(stops):
    return [reason for reason, flag in zip(REASONS, stops.flags(), strict=True) if flag]


@pytest.fixture
def hangup():
    """Restore the handler of SIGHUP, which is ignored if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_signals_are_recorded_without_interrupting():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequests(StoppingOptions()) as stops:
        # The terminal and the launcher may send the same signal, so each signal is sent twice.
        for sent, number in enumerate((*SIGNALS, *SIGNALS)):
            assert len(reasons(stops)) == min(sent, len(SIGNALS))
            os.kill(os.getpid(), number)
        assert set(reasons(stops)) == {number.name for number in SIGNALS}
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests(StoppingOptions()) as stops:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not reasons(stops)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
