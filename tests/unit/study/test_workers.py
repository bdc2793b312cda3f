"""Workers run the functions of jobs, and report how these end."""

from __future__ import annotations

import errno
import functools
import os
import signal
from pathlib import Path

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.study.executor import Executor, Job
from megatron_chameleon.study.workers import workers

DISK_FULL = RuntimeError("failed")
DISK_FULL.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def prepare(folder: Path) -> Path:
    return folder


def work(folder: Path, name: str) -> bool:
    if name == "user":
        raise UserError("x.jsonl is damaged")
    if name == "full":
        raise DISK_FULL
    if name == "bug":
        raise KeyError("bug")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    (folder / name).write_text(str(os.getpid()))
    return True


def run(folder: Path, names: list[str], count: int) -> dict[str, tuple[str, str]]:
    """Run the jobs ``names``; return state and message of each that has ended."""
    jobs = [
        Job(name=name, work=functools.partial(work, name=name), done=(folder / name).exists)
        for name in names
    ]
    ended = dict[str, tuple[str, str]]()
    with workers(count, functools.partial(prepare, folder), "fewer jobs") as launch:
        executor = Executor(jobs, count, launch)
        while executor.is_active:
            ended |= {
                event.job.name: (event.state, event.message)
                for event in executor.poll()
                if event.state != "running"
            }
    return ended


def test_each_worker_prepares_once_and_runs_job_after_job(tmp_path):
    names = [str(number) for number in range(6)]
    assert run(tmp_path, names, 2) == dict.fromkeys(names, ("done", ""))
    processes = {(tmp_path / name).read_text() for name in names}
    assert 1 <= len(processes) <= 2
    assert str(os.getpid()) not in processes


def test_errors_of_jobs_are_reported_in_one_line(tmp_path, capfd):
    ended = run(tmp_path, ["user", "full", "bug", "last"], 1)
    assert ended["user"] == ("failed", "x.jsonl is damaged")
    state, message = ended["full"]
    assert state == "failed"
    assert "No space left on device" in message
    assert ended["bug"] == ("failed", "KeyError: 'bug'")
    assert ended["last"] == ("done", "")
    assert "Traceback" in capfd.readouterr().err  # of the bug


@pytest.mark.parametrize(("name", "state"), [("killed", "failed"), ("terminated", "stopped")])
def test_the_end_of_a_process_ends_its_job(tmp_path, name, state):
    ended = run(tmp_path, [name], 1)
    assert ended[name][0] == state
    assert ("fewer jobs" in ended[name][1]) == (name == "killed")
