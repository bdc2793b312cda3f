from __future__ import annotations

import time

import pytest
import torch

from megatron_chameleon.training.metrics import PhaseTimers


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""
    now = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_laps_and_blocks_add_up_by_phase(clock):
    timers = PhaseTimers(torch.device("cpu"))
    for _ in range(2):
        clock(100)  # before the start: nobody's
        timers.start()
        clock(3)
        timers.lap("forward_backward")
        clock(1)
        timers.lap("optimizer")
        with timers.during("saving"):
            clock(7)
    assert timers.read() == {"forward_backward": 6, "optimizer": 2, "saving": 14}
    assert timers.read() == {}


def test_items_are_timed_as_they_are_made(clock):
    def slow():
        for item in range(3):
            clock(2)
            yield item

    timers = PhaseTimers(torch.device("cpu"))
    items = timers.timed(slow(), "data")
    assert [next(items), next(items)] == [0, 1]
    clock(100)
    assert list(items) == [2]
    assert timers.read() == {"data": 6}


def test_a_block_that_fails_is_timed_too(clock):
    timers = PhaseTimers(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), timers.during("validation"):
        raise ZeroDivisionError(clock(4))
    assert timers.read() == {"validation": 4}
