"""Test checkpoints on one rank: asynchronous saves, deletion of old checkpoints, full disks."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
from functools import partial

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    CheckpointWarning,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.checkpoint import save
from megatron_chameleon.errors import UserError
from megatron_chameleon.training import checkpointing
from megatron_chameleon.training.options import CheckpointingOptions, LoggingOptions
from megatron_chameleon.training.trainer import pretrain
from tests.full_disk import largest_file_size
from tests.unit.training.runs import before_steps, losses, record_at

ASYNC = CheckpointingOptions(async_save=True)
WRITE = "write_preloaded_data"
SMALLER_THAN_ANY_FILE = 100
SMALLER_THAN_THE_WEIGHTS = 50_000
"""File size limit in bytes; records, metrics and megatron's common.pt do not reach it."""


@pytest.fixture
def options_for(pretrain_options, tmp_path):
    """``options_for(**changes)``: a run in an empty folder that logs every step."""

    def options(**changes):
        settings = {"log_interval": 1, "logging": LoggingOptions(tensorboard=False), **changes}
        return pretrain_options(tmp_path / "run", **settings)

    return options


def names_in(run_dir):
    return sorted(path.name for path in (run_dir / FOLDER_NAME).iterdir())


def run_to_step_2(options_for):
    """Return the folder of a run that seems to have been killed after its checkpoint of step 2."""
    options = options_for(save_interval=2)
    pretrain(options)
    for number in (4, 6):
        shutil.rmtree(step_folder(options.run_dir, number))
    return options.run_dir


@pytest.mark.parametrize("async_save", [False, True])
def test_only_the_last_checkpoints_are_kept(options_for, tmp_path, async_save):
    checkpointing = CheckpointingOptions(async_save=async_save, keep_last_checkpoints=2)
    pretrain(options_for(train_iters=3, save_interval=1, checkpointing=checkpointing))
    kept = ["step-00000002", "step-00000003"]
    assert names_in(tmp_path / "run") == kept
    run = TrainingRun.load(tmp_path / "run")
    assert run.checkpoints == [f"checkpoints/{name}" for name in kept]


def test_the_writer_of_an_asynchronous_save_destroys_nothing_of_the_run(
    options_for, tmp_path, monkeypatch
):
    """In the writer, the destructor of a process group would wait for threads of the run."""
    run = os.getpid()

    class Garbage:
        itself: Garbage

        def __del__(self):
            if os.getpid() != run:
                (tmp_path / "destroyed").touch()

    def collected_first(write):
        def collect_and_write(*arguments, **options):
            gc.collect()
            write(*arguments, **options)

        return collect_and_write

    def plan(*arguments):
        request, garbage = save.plan_save(*arguments), Garbage()
        garbage.itself = garbage
        return request._replace(async_fn=collected_first(request.async_fn))

    monkeypatch.setattr(checkpointing, "plan_save", plan)
    pretrain(options_for(train_iters=3, save_interval=1, checkpointing=ASYNC))
    assert len(names_in(tmp_path / "run")) == 3
    assert not (tmp_path / "destroyed").exists()


@pytest.fixture
def fill_disk(monkeypatch, capsys):  # capsys captures output in memory, without limit
    """``fill_disk(size, first, until)``: limit files to ``size`` bytes during the next run.

    The limit applies from step ``first`` to the step before ``until``; the first step after the
    start or resume is step 1.
    """
    with contextlib.ExitStack() as full:

        def fill(size, first, until):
            begin = partial(full.enter_context, largest_file_size(size))
            actions = {first: lambda _model: begin(), until: lambda _model: full.close()}
            before_steps(monkeypatch, actions)
            return full

        yield fill


@pytest.mark.parametrize("async_save", [False, True])
def test_full_disk_loses_only_one_checkpoint(options_for, finished_run, fill_disk, async_save):
    run_dir = run_to_step_2(options_for)
    fill_disk(SMALLER_THAN_ANY_FILE, first=2, until=4)  # these are steps 4 and 5 of the run
    checkpointing = CheckpointingOptions(async_save=async_save)
    with pytest.warns(CheckpointWarning) as warned:
        pretrain(options_for(save_interval=2, checkpointing=checkpointing))
    (message,) = (str(w.message) for w in warned if w.category is CheckpointWarning)
    assert message.startswith(f"cannot write the checkpoint {step_folder(run_dir, 4)} (")
    run = TrainingRun.load(run_dir)
    assert (run.status, [failed.step for failed in run.failed_saves]) == ("finished", [4])
    assert names_in(run_dir) == ["step-00000002", "step-00000006"]
    assert record_at(run_dir, 6).hash == record_at(finished_run, 6).hash
    assert list(losses(run_dir)) == [1, 2, 3, 4, 5, 6]


def test_run_whose_last_checkpoint_cannot_be_written_fails_and_resumes(
    options_for, finished_run, fill_disk
):
    run_dir = run_to_step_2(options_for)
    full = fill_disk(SMALLER_THAN_THE_WEIGHTS, first=4, until=99)
    message = r"step-00000006 \(.*\); free space and run .* resumes from .*/step-00000002$"
    with pytest.raises(UserError, match=message):
        pretrain(options_for(checkpointing=ASYNC, save_interval=10))
    full.close()
    assert TrainingRun.load(run_dir).status == "failed"
    assert names_in(run_dir) == ["step-00000002"]
    pretrain(options_for(checkpointing=ASYNC))
    assert record_at(run_dir, 6).hash == record_at(finished_run, 6).hash


def test_killed_writer_loses_only_one_checkpoint(options_for, tmp_path, monkeypatch):
    real = getattr(FileSystemWriterAsync, WRITE)

    def killed_once(*arguments, **more):
        if not checkpoint_folders(tmp_path / "run"):
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments, **more)

    before_steps(monkeypatch, {6: lambda _model: monkeypatch.undo()})
    monkeypatch.setattr(FileSystemWriterAsync, WRITE, staticmethod(killed_once))
    with pytest.warns(CheckpointWarning, match=r"step-00000003 \(rank 0: .*\); training continues"):
        pretrain(options_for(checkpointing=ASYNC))
    assert names_in(tmp_path / "run") == ["step-00000006"]
