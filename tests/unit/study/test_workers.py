"""Workers run the functions of jobs, and report how these end."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
from pathlib import Path

import pytest

from megatron_chameleon.errors import UserError, system_error_message
from megatron_chameleon.study.executor import Event, Executor, Job
from megatron_chameleon.study.workers import workers

DISK_FULL = RuntimeError("failed")
DISK_FULL.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BUG = KeyError("bug")
BUG.__context__ = DISK_FULL.__cause__


def prepare(folder: Path) -> Path:
    if folder.name == "user":
        raise UserError("the tokenizer is damaged")
    if folder.name == "full":
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return folder


def work(folder: Path, name: str) -> bool:
    if name == "user":
        raise UserError("x.jsonl is damaged")
    if name == "full":
        raise DISK_FULL
    if name == "bug":
        raise BUG
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    (folder / name).write_text(str(os.getpid()))
    return True


def run(folder: Path, names: list[str], count: int) -> dict[str, Event]:
    """Run the jobs ``names``; return the last event of each."""
    jobs = [
        Job(name=name, work=functools.partial(work, name=name), done=(folder / name).exists)
        for name in names
    ]
    events = dict[str, Event]()
    with workers(count, functools.partial(prepare, folder), "fewer jobs") as launch:
        executor = Executor(jobs, count, launch)
        while executor.is_active:
            events |= {event.job.name: event for event in executor.poll()}
    return events


def test_each_worker_prepares_once_and_runs_job_after_job(tmp_path):
    names = [str(number) for number in range(6)]
    assert {event.state for event in run(tmp_path, names, 2).values()} == {"done"}
    processes = {(tmp_path / name).read_text() for name in names}
    assert 1 <= len(processes) <= 2
    assert str(os.getpid()) not in processes


def test_errors_of_jobs_keep_their_kind(tmp_path):
    """A bug has the traceback as a note; it is no system error, even if it follows one."""
    events = run(tmp_path, ["user", "full", "bug", "last"], 1)
    user, full, bug = (events[name].error for name in ("user", "full", "bug"))
    assert type(user) is UserError
    assert str(user) == "x.jsonl is damaged"
    assert type(full) is UserError
    assert re.search("No space left on device.*run the same command again", str(full))
    assert type(bug) is RuntimeError
    assert "KeyError: 'bug'" in "".join(bug.__notes__)
    assert system_error_message(bug) is None
    assert events["last"].state == "done"


@pytest.mark.parametrize(
    ("kind", "message"), [("user", "the tokenizer is damaged"), ("full", "Too many open files")]
)
def test_an_error_while_a_worker_prepares_is_that_of_its_job(tmp_path, kind, message):
    (tmp_path / kind).mkdir()
    event = run(tmp_path / kind, ["a"], 1)["a"]
    assert event.state == "failed"
    assert type(event.error) is UserError
    assert message in str(event.error)


@pytest.mark.parametrize(("name", "state"), [("killed", "failed"), ("terminated", "stopped")])
def test_the_end_of_a_process_ends_its_job(tmp_path, name, state):
    event = run(tmp_path, [name], 1)[name]
    assert event.state == state
    assert ("fewer jobs" in event.message) == (name == "killed")
