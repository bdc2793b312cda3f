"""Test run locks, and that --overwrite keeps the old run until the new run has started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.training.run_folder import LOCK_NAME, locked_run_folder, starting_run
from megatron_chameleon.training.trainer import pretrain
from tests.full_disk import largest_file_size
from tests.unit.training.runs import contents

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("process 7 on node1", file=lock, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_locked_folder_is_rejected(pretrain_options, trained_run):
    before = contents(trained_run)
    lock = trained_run / LOCK_NAME
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for overwrite in (False, True):
            with pytest.raises(UserError, match="process 7 on node1"):
                pretrain(pretrain_options(trained_run, overwrite=overwrite))
        assert contents(trained_run) == before
    finally:
        holder.kill()
        holder.communicate()
    assert lock.exists()
    pretrain(pretrain_options(trained_run))
    assert contents(trained_run) == before


def test_failed_start_leaves_the_folder_unchanged(tmp_path):
    def start_and_fail(folder):
        with locked_run_folder(folder), starting_run(folder, overwrite=True):
            assert (folder / LOCK_NAME).exists()
            (folder / "tensorboard").mkdir()
            raise ZeroDivisionError

    made, there = tmp_path / "made", tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    for folder in (made, there):
        with pytest.raises(ZeroDivisionError):
            start_and_fail(folder)
    assert not made.exists()
    assert {path.name for path in there.iterdir()} == {"notes.txt", LOCK_NAME}


def overwrite_and_be_killed(folder, moves=None, started=False):
    """Kill a process while it overwrites the run in ``folder``.

    Args:
        folder: folder of the run.
        moves: number of file moves before the process is killed; None for all moves.
        started: whether the process writes the run.json of the new run before it is killed.
    """
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    original, done = os.replace, list[object]()

    def replace(*arguments):
        done.append(arguments)
        if len(done) - 1 == moves:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*arguments)

    os.replace = replace  # type: ignore[assignment]
    with locked_run_folder(folder), starting_run(folder, overwrite=True):
        (folder / "tensorboard").mkdir()
        if started:
            (folder / "run.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moves", "started"), [(1, False), (3, False), (None, False), (None, True)]
)
def test_killed_overwrite_leaves_the_old_or_the_new_run(trained_run, moves, started):
    before = contents(trained_run)
    overwrite_and_be_killed(trained_run, moves, started)
    assert contents(trained_run) != before
    with locked_run_folder(trained_run):
        pass
    assert contents(trained_run) == ({Path("run.json"): b"{}"} if started else before)


def test_full_disk_at_the_start_restores_the_old_run(pretrain_options, trained_run):
    before = contents(trained_run)
    with (
        largest_file_size(1000),
        pytest.raises(UserError, match=r"cannot write .*run\.json.*; free space"),
    ):
        pretrain(pretrain_options(trained_run, overwrite=True))
    assert contents(trained_run) == before


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_run_that_cannot_be_moved_is_restored(trained_run, monkeypatch, failing):
    before, original, calls = contents(trained_run), os.replace, []

    def replace(*arguments):
        calls.append(arguments)
        if len(calls) == failing:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        original(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    with (
        locked_run_folder(trained_run),
        pytest.raises(UserError, match="cannot write"),
        starting_run(trained_run, overwrite=True),
    ):
        pytest.fail("the run starts")
    assert contents(trained_run) == before
