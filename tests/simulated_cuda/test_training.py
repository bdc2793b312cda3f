"""Pretraining on the device gives the CPU's losses, and the host synchronizes once per step."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.simulated_cuda.cases import (
    FP32_TOLERANCE,
    ONLINE,
    SAVE_INTERVAL,
    STEPS,
    STEPS_WITHOUT_LOGGING,
    TRAINING,
)
from tests.simulated_cuda.conftest import Finished, Tools
from tests.simulated_cuda.synchronizations import FLEX_ATTENTION


def params(*names: str) -> list[Any]:
    """Test parameters for cases; cases outside the core are marked ``slow``."""
    return [
        pytest.param(name, marks=() if TRAINING[name].is_core else pytest.mark.slow)
        for name in names
    ]


def on_device(tools: Tools, name: str) -> Finished:
    case = TRAINING[name]
    return tools.pretrain("cuda", name, case.flags, case.ranks, case.environment)


def assert_near(found: Finished, expected: Finished, tolerance: float) -> None:
    """Check that gradient norms, training losses, domain losses and validation losses agree."""
    lines, others = found.metrics(), expected.metrics()
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name in (name for name in other if "loss" in name or name == "grad_norm"):
            # The tolerance is absolute. Gradient norms are larger than losses, so they differ by
            # more.
            scale = 10 if name == "grad_norm" else 1
            near = pytest.approx(other[name], rel=0, abs=scale * tolerance)
            assert line[name] == near, name


@pytest.mark.parametrize("name", params(*TRAINING))
def test_losses_are_those_of_the_cpu(tools: Tools, name: str) -> None:
    case = TRAINING[name]
    found, expected = tools.concurrently(
        lambda: on_device(tools, name), lambda: tools.reference(case.reference)
    )
    assert_near(found, expected, case.tolerance)
    assert "CUDA" in found.log or "H100" in found.log
    assert found.values("loss")[0] - found.values("loss")[-1] > 100 * case.tolerance
    for waits in found.synchronizations():
        assert (FLEX_ATTENTION in waits.intervals) == ("flex" in case.flags)


@pytest.mark.parametrize("name", params(*TRAINING))
def test_host_waits_once_per_step(tools: Tools, name: str) -> None:
    done, is_async = on_device(tools, name), "--async-save" in TRAINING[name].flags
    for step in STEPS_WITHOUT_LOGGING:
        if is_async and step > SAVE_INTERVAL:
            break  # from now on, each step synchronizes to check if the save has ended
        for rank, waits in enumerate(done.synchronizations()):
            found = waits.of_step(step)
            assert sum(found.values()) == 1, (rank, step, dict(found))


@pytest.mark.parametrize("name", params("overlapped-async", "data-parallel"))
def test_ranks_save_the_same_common_state(tools: Tools, name: str) -> None:
    """The saved state has no device tensors: other ranks would load them on rank 0's device."""
    found = on_device(tools, name)
    assert "common state" not in found.log
    for waits in found.synchronizations():
        assert not [place for place in waits.total if "pickled device tensor" in place]


def test_device_follows_the_rules_of_cuda(tools: Tools) -> None:
    found = tools.run("cuda", "rules", ["tests/simulated_cuda/device_rules.py"])
    assert found.status == 0, found.log


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cuda")])
def test_a_run_is_resumed_on_either_device(tools: Tools, first, second) -> None:
    case = "fp32" if first == "cpu" else "bf16"
    whole = tools.reference() if first == "cpu" else on_device(tools, case)
    name = f"from-{first}"
    resumed = tools.root / f"{name}-{second}"
    shutil.copytree(whole.folder, resumed)
    last = resumed / "checkpoints" / f"step-{STEPS:08d}"
    shutil.rmtree(last)
    found = tools.pretrain(second, name, TRAINING[case].flags)
    if first == second:
        assert found.metrics() == whole.metrics()
    else:
        assert_near(found, whole, FP32_TOLERANCE)
    assert last.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("method", ONLINE)
def test_online_mixing_finds_the_weights_of_the_cpu(tools: Tools, method) -> None:
    flags = ONLINE[method]
    found, expected = tools.concurrently(
        lambda: tools.pretrain("cuda", f"online-{method}", flags, ranks=2),
        lambda: tools.reference(flags),
    )
    assert_near(found, expected, FP32_TOLERANCE)
    for line, other in zip(found.metrics(), expected.metrics(), strict=True):
        assert line["hook"]["weights"] == pytest.approx(other["hook"]["weights"], abs=1e-4)
