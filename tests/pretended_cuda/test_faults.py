"""The simulated device detects operations that would fail or be slow on a GPU."""

from __future__ import annotations

import pytest

from tests.pretended_cuda.cases import PRETRAINING_FLAGS, STEPS
from tests.pretended_cuda.conftest import PRETRAIN, Finished, Tools


def pretrain_with(tools: Tools, fault: str) -> Finished:
    return tools.run("cuda", fault, [*PRETRAIN, *PRETRAINING_FLAGS], fault=fault)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pin_expanded_tensors", "refers to a single memory location"),
        ("reduce_host_tensor", "No backend type associated with device type cpu"),
    ],
)
def test_it_fails_where_cuda_would(tools: Tools, fault: str, message: str) -> None:
    found = pretrain_with(tools, fault)
    assert found.status != 0
    assert message in found.log


def test_a_wait_in_the_step_is_counted_with_its_place(tools: Tools) -> None:
    found = pretrain_with(tools, "read_value")
    assert found.status == 0, found.log
    (waits,) = found.synchronizations()
    last = waits.of_step(STEPS)
    assert sum(last.values()) > 1
    assert [place for place in last if "tests/pretended_cuda/faults.py:" in place]


def test_the_device_keeps_cudas_rules(tools: Tools) -> None:
    found = tools.run("cuda", "rules", ["tests/pretended_cuda/device_rules.py"])
    assert found.status == 0, found.log
