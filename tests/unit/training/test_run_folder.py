"""A run's folder: one job at a time, and an old run that goes only when a new one has begun."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.training import run_folder
from megatron_chameleon.training.run_folder import LOCK_NAME
from megatron_chameleon.training.trainer import pretrain
from tests.full_disk import largest_file_size

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("process 7 on node1", file=lock, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_another_job_is_refused_as_long_as_one_writes(pretrain_options, trained_run):
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


def test_a_folder_in_which_nothing_begins_is_as_it_was(tmp_path):
    def begin_and_fail(folder):
        with run_folder._locked_folder(folder), run_folder._starting_run(folder, overwrite=True):
            assert (folder / LOCK_NAME).exists()
            (folder / "tensorboard").mkdir()
            raise ZeroDivisionError

    made, there = tmp_path / "made", tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    for folder in (made, there):
        with pytest.raises(ZeroDivisionError):
            begin_and_fail(folder)
    assert not made.exists()
    assert [path.name for path in there.iterdir()] == ["notes.txt"]


def test_the_file_of_a_lock_that_was_removed_meanwhile_is_not_enough(tmp_path, monkeypatch):
    """As if the job before had left between the opening of its file and the locking."""
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


def killed_while_beginning(folder, moves=None, begun=False):
    """A process that overwrites the run in ``folder`` and is killed on its way.

    After so many ``moves`` of files; or in the block, once it has written its first record or not.
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
        if begun:
            (folder / "run.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moves", [0, 1, 3, None])
def test_a_job_killed_before_its_first_record_leaves_the_old_run(trained_run, moves):
    before = contents(trained_run)
    killed_while_beginning(trained_run, moves)
    assert contents(trained_run) != before
    with run_folder._locked_folder(trained_run):
        pass
    assert contents(trained_run) == before


def test_a_job_killed_after_its_first_record_leaves_the_new_run(trained_run):
    killed_while_beginning(trained_run, begun=True)
    with run_folder._locked_folder(trained_run):
        pass
    assert contents(trained_run) == {
        trained_run.joinpath("run.json").relative_to(trained_run): b"{}"
    }


def test_a_disk_that_is_full_when_the_new_run_begins_brings_the_old_one_back(
    pretrain_options, trained_run
):
    before = contents(trained_run)
    with (
        largest_file_size(1000),
        pytest.raises(UserError, match=r"cannot write .*run\.json.*; free space"),
    ):
        pretrain(pretrain_options(trained_run, overwrite=True))
    assert contents(trained_run) == before


def test_a_rest_that_cannot_be_deleted_is_named_and_the_run_stays_where_it_is(
    trained_run, monkeypatch
):
    """As where a disk of the network keeps a file that another process has open."""
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    (trained_run / ".replaced").mkdir()
    (trained_run / ".replaced" / ".nfs0001").touch()
    before = contents(trained_run)
    for _ in range(2):
        with (
            run_folder._locked_folder(trained_run),
            pytest.raises(UserError, match=r"\.replaced, .* cannot be deleted"),
            run_folder._starting_run(trained_run, overwrite=True),
        ):
            pytest.fail("nothing begins")
        assert contents(trained_run) == before


@pytest.mark.parametrize("refused_at", [1, 2, 4])
def test_a_run_that_cannot_be_set_aside_is_put_back_at_once(trained_run, monkeypatch, refused_at):
    before, original, calls = contents(trained_run), os.replace, []

    def replace(*arguments):
        calls.append(arguments)
        if len(calls) == refused_at:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        original(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    with (
        run_folder._locked_folder(trained_run),
        pytest.raises(UserError, match="cannot write"),
        run_folder._starting_run(trained_run, overwrite=True),
    ):
        pytest.fail("nothing begins")
    assert contents(trained_run) == before
