"""Run folder: one job at a time, and the deletion of an old run."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.run_folder import LOCK_NAME, delete_run
from megatron_chameleon.training.trainer import pretrain
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


def test_run_json_is_deleted_last(trained_run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", Mock(side_effect=OSError(errno.EBUSY, "busy")))
        with pytest.raises(UserError, match="busy"):
            delete_run(trained_run)
    assert TrainingRun.exists(trained_run)
    delete_run(trained_run)
    assert contents(trained_run) == {}
