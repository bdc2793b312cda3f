from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Cost, Stopwatch

costs = st.builds(
    Cost, st.floats(0, 1e24), st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 4096)
)


def test_costs_add_up_and_the_devices_held_are_the_most_at_once():
    total = Cost(1e15, 80.0, 10.0, 8) + Cost(2e15, 5.0, 5.0, 1)
    assert total == Cost(3e15, 85.0, 15.0, 8)


@given(costs, costs)
def test_the_order_of_stages_does_not_matter(first, second):
    assert first + second == second + first
    assert first + Cost() == first


def test_a_stopwatch_counts_the_time_of_every_device():
    stopwatch = Stopwatch()
    time.sleep(0.05)
    cost = stopwatch.cost(flops=7.0, num_devices=4)
    assert cost.flops == 7.0
    assert cost.num_devices == 4
    assert 0.05 <= cost.wall_seconds <= stopwatch.seconds() < 10
    assert cost.device_seconds == pytest.approx(4 * cost.wall_seconds)
