from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from megatron_chameleon.corpus.shards import quick_thread_switches, read_ahead


def test_the_items_come_in_their_order():
    assert list(read_ahead(range(100), depth=3)) == list(range(100))
    assert list(read_ahead([], depth=1)) == []


def test_items_are_taken_before_they_are_asked_for_but_not_too_many():
    taken = []

    def items():
        for item in range(10):
            taken.append(item)
            yield item

    ahead = read_ahead(items(), depth=2)
    next(ahead)
    wait_until(lambda: len(taken) == 4)  # one is used, two wait, one waits to be put there
    time.sleep(0.05)
    assert taken == [0, 1, 2, 3]
    assert list(ahead) == list(range(1, 10))


def test_what_goes_wrong_is_raised_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("no second")

    ahead = read_ahead(items(), depth=2)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="no second"):
        next(ahead)


def test_the_thread_ends_with_the_generator():
    ahead = read_ahead(iter(int, 1), depth=1)
    next(ahead)
    ahead.close()
    wait_until(lambda: not any(thread.name == "read-ahead" for thread in threading.enumerate()))


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_threads_take_quick_thread_switches_in_the_block_alone():
    before = sys.getswitchinterval()
    with contextlib.suppress(KeyError), quick_thread_switches():
        assert sys.getswitchinterval() == pytest.approx(5e-4)
        raise KeyError
    assert sys.getswitchinterval() == before
