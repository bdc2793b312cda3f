from __future__ import annotations

import os
import signal
import time

import pytest

from megatron_chameleon.training import stopping
from megatron_chameleon.training.options import StoppingOptions
from megatron_chameleon.training.stopping import REASONS, StopRequests


def reasons(stops):
    return [reason for reason, flag in zip(REASONS, stops.flags(), strict=True) if flag]


def send(number):
    """Signals to oneself are handled before the call that sends them returns."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_nothing_is_interrupted(number):
    with StopRequests(StoppingOptions()) as stops:
        assert reasons(stops) == []
        send(number)
        assert reasons(stops) == [number.name]


def test_what_comes_twice_from_terminal_and_launcher_is_one_wish():
    with StopRequests(StoppingOptions()) as stops:
        send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert reasons(stops) == ["SIGTERM", "SIGINT"]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second, monkeypatch):
    monkeypatch.setattr(stopping, "SECONDS_OF_ONE_REQUEST", 0.0)
    with StopRequests(StoppingOptions()):
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(second)


def test_handlers_are_as_they_were_afterwards():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ZeroDivisionError), StopRequests(StoppingOptions()):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_time_is_up_after_so_many_minutes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stops = StopRequests(StoppingOptions(exit_duration_in_mins=0.5))
    now[0] = 129.0
    assert reasons(stops) == []
    now[0] = 130.0
    assert reasons(stops) == ["--exit-duration-in-mins"]
