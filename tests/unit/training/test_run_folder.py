"""Run folder: one job at a time, and an old run is deleted only once a new one has started."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.training import run_folder
from megatron_chameleon.training.run_folder import LOCK_NAME
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
        assert {p: c for p, c in contents(trained_run).items() if p.name != LOCK_NAME} == before
    finally:
        holder.kill()
        holder.communicate()
    assert lock.exists()
    pretrain(pretrain_options(trained_run))
    assert contents(trained_run) == before


def test_failed_start_leaves_the_folder_unchanged(tmp_path):
    def start_and_fail(folder):
        with run_folder._locked_folder(folder), run_folder._starting_run(folder, overwrite=True):
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
    assert [path.name for path in there.iterdir()] == ["notes.txt"]


def test_lock_whose_file_was_removed_is_retried(tmp_path, monkeypatch):
    """As if the previous job had ended between opening the file and locking it."""
    path, calls = tmp_path / LOCK_NAME, []
    original = fcntl.lockf

    def lockf(descriptor, kind):
        calls.append(kind)
        if len(calls) == 1:
            path.unlink()
        return original(descriptor, kind)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    descriptor = run_folder._lock(path)
    assert len(calls) == 2
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    os.close(descriptor)


def overwrite_and_be_killed(folder, moves=None, started=False):
    """Overwrite the run in ``folder`` in a process that is killed.

    Either after ``moves`` file moves, or after them all, once a new run.json is there or not.
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
    with run_folder._locked_folder(folder), run_folder._starting_run(folder, overwrite=True):
        (folder / "tensorboard").mkdir()
        if started:
            (folder / "run.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moves", "started"), [(0, False), (1, False), (3, False), (None, False), (None, True)]
)
def test_killed_overwrite_leaves_the_old_or_the_new_run(trained_run, moves, started):
    before = contents(trained_run)
    overwrite_and_be_killed(trained_run, moves, started)
    assert contents(trained_run) != before
    with run_folder._locked_folder(trained_run):
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


def overwrite_in_vain(folder, problem):
    before = contents(folder)
    with (
        run_folder._locked_folder(folder),
        pytest.raises(UserError, match=problem),
        run_folder._starting_run(folder, overwrite=True),
    ):
        pytest.fail("the run starts")
    assert contents(folder) == before


def test_remainder_that_cannot_be_deleted_is_an_error(trained_run, monkeypatch):
    """As on a network disk, which keeps a file that another process has open."""
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    (trained_run / ".replaced").mkdir()
    (trained_run / ".replaced" / ".nfs0001").touch()
    for _ in range(2):
        overwrite_in_vain(trained_run, r"\.replaced, .* cannot be deleted")


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_run_that_cannot_be_moved_is_restored(trained_run, monkeypatch, failing):
    original, calls = os.replace, []

    def replace(*arguments):
        calls.append(arguments)
        if len(calls) == failing:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        original(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    overwrite_in_vain(trained_run, "cannot write")
