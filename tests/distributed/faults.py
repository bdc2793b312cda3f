"""Launches of ranks that are killed, stopped or started with wrong options.

The output of a launch is written to ``places.root/NAME.log``. Its exit status and the state of its
run folder are written to NAME.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import megatron_chameleon.checkpoint.save as save
import megatron_chameleon.training.trainer as training
from megatron_chameleon.artifacts import Corpus, TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    CheckpointFile,
    checkpoint_folders,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.checkpointing import verify_files
from megatron_chameleon.training.guard import StepSync
from megatron_chameleon.training.metrics import memory_bytes, most_memory_bytes
from megatron_chameleon.training.stopping import REASONS
from tests.distributed import cases
from tests.distributed import launch as launching
from tests.distributed.cases import Places
from tests.distributed.launch import REPOSITORY, fork_ranks, wait_for_step
from tests.distributed.ranks import around_steps
from tests.small_corpus import write_small_corpus

NUM_RANKS = 2
KILLED_RANK = 1
SECONDS_OF_A_SLOW_WRITE = 3.0


def launch(places: Places, name: str, function: Callable[[], Any]) -> int:
    """Call ``function`` on two ranks; return the launcher's exit status."""
    launcher = fork_ranks(NUM_RANKS, places.root / f"{name}.log", function)
    launcher.join()
    return int(launcher.exitcode)


def record(places: Places, name: str, **found: Any) -> None:
    (places.root / f"{name}.json").write_text(json.dumps(found))


def run_tool(tool: str, arguments: Sequence[str]) -> None:
    """Run a tool in this process with these command-line arguments."""
    sys.argv = [tool, *arguments]
    runpy.run_path(str(REPOSITORY / "tools" / tool), run_name="__main__")


# Runs with a rank that is killed.


def kill_at(places: Places, moment: str) -> None:
    """Start or resume the run, and kill rank 1 with SIGKILL at ``moment``.

    "in-save" means that rank 1 has written its files of the checkpoint of step 6, but not their
    hashes. "in-async-save" is the moment before step 10, while the checkpoint of step 9 is being
    written.
    """
    status = launch(places, f"killed-{moment}", partial(train_and_be_killed, places, moment))
    run = TrainingRun.load(places.run(cases.KILLED_RUN))
    left = sorted(path.name for path in (run.root / FOLDER_NAME).iterdir())
    found = {"status": status, "left": left, "run_status": run.status, "step": run.step}
    record(places, f"killed-{moment}", **found)


def train_and_be_killed(places: Places, moment: str) -> None:
    is_mine = os.environ["RANK"] == str(KILLED_RANK)
    is_async = moment == "in-async-save"
    done = len(checkpoint_folders(places.run(cases.KILLED_RUN))) * cases.SAVING_INTERVAL
    steps = itertools.count(done + 1)
    options = cases.saving_options(places, cases.KILLED_RUN, cases.DP2_SHARDED, async_save=is_async)

    def kill_before_step_10(_model: object) -> None:
        if next(steps) == 10:
            kill_myself()

    with contextlib.ExitStack() as stack:
        if is_mine and moment == "in-save":
            stack.enter_context(instead_of_hashing(6, kill_myself))
        if is_async:
            slow = partial(time.sleep, SECONDS_OF_A_SLOW_WRITE)
            stack.enter_context(instead_of_hashing(9, slow))
        if is_mine and is_async:
            stack.enter_context(around_steps(kill_before_step_10))
        training.pretrain(options)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def instead_of_hashing(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before this process hashes its files of the checkpoint of ``step``."""

    def hash_late(path: Path) -> CheckpointFile:
        if f"step-{step:08d}" in path.parent.name:
            act()
        return CheckpointFile.of(path)

    with mock.patch.object(save, "CheckpointFile", types.SimpleNamespace(of=hash_late)):
        yield


# Runs that are stopped.


def stopped_flags(places: Places) -> list[str]:
    """A long run on two ranks that saves only when it is stopped."""
    options = cases.training_options(places, cases.STOPPED_RUN, cases.TP2)
    options = dataclasses.replace(options, train_iters=cases.STOPPED_ITERS, save_interval=10_000)
    return launching.flags(options)


def stop_by(places: Places, reason: str) -> None:
    """Start or resume the run, and stop it two steps later."""
    run_dir, log = places.run(cases.STOPPED_RUN), places.root / f"stopped-{reason}.log"
    before = TrainingRun.load(run_dir).step if TrainingRun.exists(run_dir) else 0
    arguments = stopped_flags(places)
    if reason.startswith("--"):
        arguments += [reason, "0.0001"]
    pids = places.root / f"pids-{reason}"
    pids.mkdir()

    def train() -> None:
        (pids / os.environ["RANK"]).write_text(str(os.getpid()))
        run_tool("pretrain_gpt.py", arguments)

    launcher = fork_ranks(NUM_RANKS, log, train)
    if not reason.startswith("--"):
        wait_for_step(log, before + 2, launcher.is_alive)
        if reason == "SIGUSR1":  # send the signal to only one rank
            os.kill(int((pids / "1").read_text()), signal.SIGUSR1)
        else:
            os.kill(launcher.pid, signal.SIGTERM)
    launcher.join()
    run = TrainingRun.load(run_dir)
    record(
        places,
        f"stopped-{reason}",
        status=launcher.exitcode,
        run_status=run.status,
        stopped_by=run.stopped_by,
        step=run.step,
        checkpoints=[folder.name for folder in checkpoint_folders(run_dir)],
        steps=[line["step"] for line in run.metrics()],
    )


# Agreement between ranks.


def agree(places: Places) -> None:
    """Allocate extra memory on rank 1; on both ranks, record memory, signals and damage."""
    root = places.root / "agreement"
    root.mkdir()
    corpus = write_small_corpus(root / "corpus")
    tokens = Path(f"{corpus.prefix('poems', 'valid')}.bin")
    tokens.write_bytes(b"\0" + tokens.read_bytes()[1:])
    record(places, "agreement", status=launch(places, "agreement", partial(record_agreement, root)))


def record_agreement(root: Path) -> None:
    with distributed(ParallelOptions(), seed=0) as layout:
        taken = torch.ones(layout.rank * cases.MORE_BYTES // 4)
        found: dict[str, Any] = {
            "most memory": most_memory_bytes(layout.device),
            "memory": memory_bytes(layout.device),
            "signals": StepSync(layout, 1).signals(
                [float(reason == "SIGUSR1") * layout.rank for reason in REASONS[:-1]] + [1.0]
            ),
        }
        del taken
        try:
            verify_files(Corpus.load(root / "corpus"), "the corpus", layout)
        except UserError as error:
            found["damage"] = str(error)
    (root / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch_faults(places: Places) -> None:
    """Run every launch, forked from this process."""
    agree(places)
    for name, arguments in cases.MISTAKES.items():
        flags = [argument.format(root=places.root) for argument in arguments]
        corpus = ["--corpus", str(places.corpus), "--tensor-model-parallel-size", "2"]
        work = partial(run_tool, "pretrain_gpt.py", [*corpus, *flags])
        record(places, f"mistake-{name}", status=launch(places, f"mistake-{name}", work))
    for moment in cases.KILLS:
        kill_at(places, moment)
    for reason in cases.STOPS:
        stop_by(places, reason)
