"""One value from a forked process to the one it was forked from."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from megatron_chameleon.checkpoint.save import Handover

LARGER_THAN_ANY_PIPE = {"values": list(range(1_000_000))}


def in_a_fork(function, *given):
    """Its exit status, once it has ended; nothing is read before that."""
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    process.join(20)
    return process.exitcode


@pytest.mark.parametrize("value", ["a problem", LARGER_THAN_ANY_PIPE], ids=["small", "large"])
def test_a_value_of_any_size_is_read_after_the_end_of_its_process(value):
    handover = Handover()
    assert in_a_fork(handover.put, value) == 0
    assert handover.get() == value


def test_a_value_of_the_same_process_stays_there():
    handover, value = Handover(), object()
    handover.put(value)
    assert handover.get() is value


def put_half_and_die(handover):
    handover.put("a" * 1000)
    os.ftruncate(handover._memory.fileno(), 500)
    os.kill(os.getpid(), signal.SIGKILL)


def die(_handover):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("act", [die, put_half_and_die])
def test_a_killed_process_has_said_nothing(act):
    handover = Handover()
    assert in_a_fork(act, handover) == -signal.SIGKILL
    assert handover.get() is None
