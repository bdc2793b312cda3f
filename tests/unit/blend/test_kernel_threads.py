from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.threads import even_ranges, for_each, usable_threads


def test_one_thread_for_each_core_of_the_process():
    assert usable_threads() == len(os.sched_getaffinity(0))
    assert usable_threads(3) == 3
    with pytest.raises(ValueError, match="num_threads is 0"):
        usable_threads(0)


@given(st.integers(0, 1000), st.integers(-1, 40))
def test_even_ranges_cover_all_once(size, num_parts):
    parts = even_ranges(size, num_parts)
    assert [number for part in parts for number in part] == list(range(size))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert len(parts) == max(1, min(size, num_parts))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_results_come_in_order(num_threads):
    assert for_each(lambda part: part * part, range(10), num_threads) == [i * i for i in range(10)]


def test_parts_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)
    for_each(lambda _: meeting.wait(), range(3), 3)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_errors_reach_the_caller(num_threads):
    def fail(part):
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 0"):
        for_each(fail, range(2), num_threads)
