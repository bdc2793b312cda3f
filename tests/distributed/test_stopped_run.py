"""A run is asked to stop, in each of the ways there are; the same command goes on with it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders
from tests.distributed.launch import (
    finish,
    flags,
    kill_group,
    rank_process,
    start,
    torchrun,
    wait_for_step,
)
from tests.distributed.layout_cases import ONE, TP2, training_options

SECONDS = 120.0
TRAIN_ITERS = 400


@dataclasses.dataclass(frozen=True)
class Stopped:
    """How a start of the run ended."""

    status: int
    said: str
    run: TrainingRun
    checkpoints: list[str]


class StoppedRun:
    """A long run of two ranks that saves only when it is asked to stop."""

    def __init__(self, places) -> None:
        options = training_options(places, "stopped", TP2)
        self.options = dataclasses.replace(options, train_iters=TRAIN_ITERS, save_interval=10_000)
        self.folder = places.run("stopped")
        self.log = places.root / "stopped.log"

    def command(self, *more: str) -> list[str]:
        return torchrun(TP2.ranks, "tools/pretrain_gpt.py", *flags(self.options), *more)

    def stop_by(self, ask: Callable[[int], None], steps: int) -> Stopped:
        """Start it, let it take ``steps`` steps, and ``ask`` the launcher's process."""
        self.log.unlink(missing_ok=True)
        before = TrainingRun.load(self.folder).step if TrainingRun.exists(self.folder) else 0
        process = start(self.command(), self.log)
        try:
            wait_for_step(self.log, before + steps, process)
            ask(process.pid)
            status = process.wait(SECONDS)
        finally:
            kill_group(process)
        return self.end(status)

    def end(self, status: int) -> Stopped:
        folders = [str(Path(folder).name) for folder in checkpoint_folders(self.folder)]
        return Stopped(status, self.log.read_text(), TrainingRun.load(self.folder), folders)


@pytest.fixture(scope="module")
def stopped(places) -> dict[str, Stopped]:
    """Four starts of one run, each ended in another way."""
    run = StoppedRun(places)
    one_rank = run.stop_by(lambda pid: os.kill(rank_process(pid, rank=1), signal.SIGUSR1), steps=2)
    terminal = run.stop_by(lambda pid: os.killpg(pid, signal.SIGINT), steps=2)
    launcher = run.stop_by(lambda pid: os.kill(pid, signal.SIGTERM), steps=2)
    run.log.unlink()
    process = start(run.command("--exit-duration-in-mins", "0.0001"), run.log)
    duration = run.end(finish(process, SECONDS))
    return {
        "SIGUSR1": one_rank,
        "SIGINT": terminal,
        "SIGTERM": launcher,
        "--exit-duration-in-mins": duration,
    }


@pytest.mark.parametrize("reason", ["SIGUSR1", "SIGINT", "SIGTERM", "--exit-duration-in-mins"])
def test_all_ranks_stop_at_one_step_and_save_it(stopped, reason):
    found = stopped[reason]
    assert (found.run.status, found.run.stopped_by) == ("interrupted", reason), found.said
    assert found.checkpoints[-1] == f"step-{found.run.step:08d}"
    assert f"stopped by {reason} at step {found.run.step} of {TRAIN_ITERS}" in found.said
    assert "Traceback" not in found.said.split("death signal")[0]  # then torchrun's own follows


def test_one_rank_that_is_asked_to_leave_takes_all_with_it_with_status_0(stopped):
    assert stopped["SIGUSR1"].status == 0, stopped["SIGUSR1"].said


def test_time_that_is_up_ends_with_status_0(stopped):
    assert stopped["--exit-duration-in-mins"].status == 0


def test_torchrun_tells_of_the_signal_by_its_own_status(stopped):
    assert stopped["SIGTERM"].status != 0
    assert stopped["SIGINT"].status != 0


def test_each_start_goes_on_where_the_one_before_stopped(stopped):
    steps = [found.run.step for found in stopped.values()]
    assert 2 <= steps[0] < steps[1] < steps[2] == steps[3] - 1
    assert f"continuing at step {steps[0]}:" in stopped["SIGINT"].said
    lines = [line["step"] for line in stopped["--exit-duration-in-mins"].run.metrics()]
    assert lines == list(range(1, steps[3] + 1))


def test_a_signal_that_comes_while_the_libraries_are_imported_is_not_lost(places):
    options = training_options(places, "asked-early", ONE)
    log = places.root / "asked-early.log"
    process = start([sys.executable, "tools/pretrain_gpt.py", *flags(options)], log)
    try:
        wait_until_taken(signal.SIGUSR1, process.pid)
        os.kill(process.pid, signal.SIGUSR1)
    finally:
        status = finish(process, SECONDS)
    assert status == 0, log.read_text()
    assert f"stopped by SIGUSR1 before step 1 of {options.train_iters}" in log.read_text()
    assert not places.run("asked-early").exists()


def wait_until_taken(number: int, pid: int) -> None:
    """Wait until the process handles the signal, which would end it before."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        if caught and int(caught[1], 16) & 1 << number - 1:
            return
        time.sleep(0.01)
    pytest.fail(f"the process does not take signal {number}")
