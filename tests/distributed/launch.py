"""Starting ranks, and ending them again whatever happens."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]


def torchrun(num_ranks: int, script: Path | str, *arguments: str) -> list[str]:
    """The command that starts ``script`` on so many ranks of this machine, at any free port."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, "--nproc-per-node", str(num_ranks), str(REPOSITORY / script), *arguments]


def flags(options: Any) -> list[str]:
    """The command line that gives the dataclass ``options``, groups of options included."""
    found: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            found += flags(value)
        elif isinstance(value, bool) and field.default is True:
            found += [] if value else ["--no-" + name.removeprefix("--")]
        elif isinstance(value, bool):
            found += [name] if value else []
        elif isinstance(value, tuple):  # of an option that may be given several times
            found += [word for group in value for word in (name, *group)]
        elif value is not None:
            found += [name, str(value)]
    return found


def start(command: list[str], log: Path, folder: Path = REPOSITORY) -> subprocess.Popen[bytes]:
    """Start ``command`` in ``folder`` as the leader of its own process group, and log its words."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for the end and return the exit status; whatever is left of the group is killed."""
    try:
        return process.wait(seconds)
    finally:
        kill_group(process)


def wait_for_step(log: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run of ``process`` has logged ``step``; fail if it ends before."""
    while not re.search(rf"^step +{step}/", log.read_text(), re.MULTILINE):
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)


def rank_process(launcher: int, rank: int) -> int:
    """The process of one rank among the launcher's own children."""
    (found,) = (
        child.pid
        for child in psutil.Process(launcher).children()
        if child.environ().get("RANK") == str(rank)
    )
    return int(found)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, at once and without a word."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have left by themselves
    process.wait()


def environment() -> Mapping[str, str]:
    """This process's environment without what a launcher set, one thread a rank, and no GPU.

    There may be one, but not one for each rank; what is tested here are ranks over gloo. There
    parallel/cpu.py lets nothing be compiled; torch is told before it imports its compiler, which
    takes each rank a second.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
