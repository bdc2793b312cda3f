"""Runs that skip consecutive steps: stopped, resumed and given up."""

from __future__ import annotations

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


@pytest.fixture
def options(pretrain_options, tmp_path, monkeypatch):
    """A run that stopped after step 4, the second skipped step in a row."""
    options = pretrain_options(
        tmp_path / "run",
        save_interval=2,
        guards=THREE,
        data=DataOptions(permutation="epoch"),
        checkpointing=CheckpointingOptions(keep_last_checkpoints=1),
    )

    def fail_and_stop(model):
        NAN(model)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        before_steps(patched, {3: NAN, 4: fail_and_stop})
        pretrain(options)
    return options


def test_a_streak_continues_across_a_resume(options, monkeypatch):
    run_dir = options.run_dir
    kept = TrainingRun.load(run_dir).checkpoints
    assert kept == ["checkpoints/step-00000002", "checkpoints/step-00000004"]
    before_steps(monkeypatch, {1: NAN})
    with pytest.raises(UserError, match="3 steps in a row were skipped, 3 to 5, ") as error:
        pretrain(options)
    message = str(error.value)
    assert str(step_folder(run_dir, 2)) in message
    samples = 3 * options.global_batch_size
    assert sum(int(message.split(f"{name} (")[1].split()[0]) for name in DOMAINS) == samples
    assert TrainingRun.load(run_dir).skipped_steps == 3
    assert TrainingRun.load(run_dir).checkpoints == kept


def test_an_accepted_step_ends_a_streak(options, tmp_path, pretrain_options, monkeypatch):
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
