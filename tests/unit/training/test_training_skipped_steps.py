"""Runs that skip steps in a row, stop among them, go on and give up."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.options import CheckpointingOptions, GuardOptions
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS
from tests.unit.training.bad_steps import before_steps, poison

NAN = poison(math.nan)
THREE = GuardOptions(max_consecutive_skipped_steps=3)


def stop(_model):
    os.kill(os.getpid(), signal.SIGTERM)


def stop_in_a_streak(options, monkeypatch):
    """Stop after step 4, the second that is skipped in a row."""
    with monkeypatch.context() as patched:
        before_steps(patched, {3: NAN, 4: lambda model: (NAN(model), stop(model))})
        pretrain(options)


@pytest.fixture
def options(pretrain_options, tmp_path):
    return pretrain_options(
        tmp_path / "run",
        save_interval=2,
        guards=THREE,
        data=DataOptions(permutation="epoch"),
        checkpointing=CheckpointingOptions(keep_last_checkpoints=1),
    )


def test_a_stop_in_a_streak_does_not_end_it(options, monkeypatch):
    stop_in_a_streak(options, monkeypatch)
    run_dir = options.run_dir
    kept = TrainingRun.load(run_dir).checkpoints
    assert kept == ["checkpoints/step-00000002", "checkpoints/step-00000004"]
    with monkeypatch.context() as patched:
        before_steps(patched, {1: NAN})
        with pytest.raises(UserError, match="3 steps in a row were skipped, 3 to 5, ") as told:
            pretrain(options)
    said = str(told.value)
    assert f"before them: {step_folder(run_dir, 2)};" in said
    samples = 3 * options.global_batch_size
    assert sum(int(said.split(f"{name} (")[1].split()[0]) for name in DOMAINS) == samples
    assert TrainingRun.load(run_dir).skipped_steps == 3
    assert TrainingRun.load(run_dir).checkpoints == kept


def test_a_good_step_ends_it_and_the_run_is_as_if_it_had_not_stopped(
    options, tmp_path, pretrain_options, monkeypatch
):
    stop_in_a_streak(options, monkeypatch)
    with monkeypatch.context() as patched:
        before_steps(patched, {2: NAN})
        pretrain(options)
    record = CheckpointRecord.load(step_folder(options.run_dir, 6))
    assert [step["step"] for step in record.guard["streak"]] == [6]
    whole = pretrain_options(tmp_path / "whole", guards=THREE, data=options.data)
    before_steps(monkeypatch, {3: NAN, 4: NAN, 6: NAN})
    pretrain(whole)
    assert CheckpointRecord.load(step_folder(whole.run_dir, 6)).guard == record.guard
    assert CheckpointRecord.load(step_folder(whole.run_dir, 6)).hash == record.hash


def test_a_checkpoint_of_before_is_read(options, monkeypatch):
    """It says nothing of a streak, nor of the weights that its losses were drawn by."""
    stop_in_a_streak(options, monkeypatch)
    path = step_folder(options.run_dir, 4) / CheckpointRecord.FILE_NAME
    record = json.loads(path.read_text())
    del record["guard"]["streak"], record["guard"]["phase"], record["checksum"]
    path.write_text(json.dumps(record))
    before_steps(monkeypatch, {1: NAN, 2: NAN})
    pretrain(options)
    assert TrainingRun.load(options.run_dir).status == "finished"
