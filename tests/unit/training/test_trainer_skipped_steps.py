"""Test runs that skip one or several consecutive steps, also across a resume."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.options import CheckpointingOptions, GuardOptions
from megatron_chameleon.training.trainer import pretrain
from tests.unit.training.runs import before_steps, losses, metrics, poison, record_at, weights_at

NAN = poison(math.nan)
THREE = GuardOptions(max_consecutive_skipped_steps=3)


def test_infinite_gradient_in_the_last_step_is_skipped(
    pretrain_options, finished_run, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    before_steps(monkeypatch, {6: poison(math.inf)})
    pretrain(pretrain_options(run_dir))
    run, records, expected = TrainingRun.load(run_dir), metrics(run_dir), metrics(finished_run)
    assert (run.status, run.step, run.skipped_steps) == ("finished", 6, 1)
    assert [record["skipped_steps"] for record in records.values()] == [0, 0, 0, 1]
    (skipped,) = records[6]["skipped"]
    assert skipped["step"] == 6
    assert sum(skipped["domain_samples"].values()) == 8
    # The losses are those of step 5 only, but data and learning rate also advance in step 6.
    assert records[6]["loss"] != expected[6]["loss"]
    assert sum(records[6]["domain_tokens"].values()) == 8 * 32
    assert sum(records[6]["domain_tokens_sampled"].values()) == 2 * 8 * 32
    assert records[6]["lr"] == expected[6]["lr"]
    assert all(torch.isfinite(weight).all() for weight in weights_at(run_dir, 6).values())
    assert run.cost.flops == TrainingRun.load(finished_run).cost.flops
    assert record_at(run_dir, 6).hash != record_at(finished_run, 6).hash


def test_run_with_too_many_skipped_steps_fails_and_keeps_the_last_checkpoint(
    pretrain_options, finished_run, tmp_path, monkeypatch
):
    options = pretrain_options(tmp_path / "run", guards=THREE)
    with monkeypatch.context() as patched:
        before_steps(patched, dict.fromkeys((4, 5, 6), NAN))
        with pytest.raises(UserError, match="3 steps in a row were skipped, 4 to 6"):
            pretrain(options)
    run = TrainingRun.load(options.run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("failed", 6, 3)
    assert run.checkpoints == ["checkpoints/step-00000003"]
    assert metrics(options.run_dir)[4]["loss"] is None
    pretrain(options)
    assert losses(options.run_dir) == losses(finished_run)
    assert TrainingRun.load(options.run_dir).skipped_steps == 0


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


def test_streak_continues_across_a_resume(options, monkeypatch):
    run_dir = options.run_dir
    kept = TrainingRun.load(run_dir).checkpoints
    assert kept == ["checkpoints/step-00000002", "checkpoints/step-00000004"]
    before_steps(monkeypatch, {1: NAN})
    with pytest.raises(UserError, match="3 steps in a row were skipped, 3 to 5;") as error:
        pretrain(options)
    assert str(step_folder(run_dir, 2)) in str(error.value)
    assert TrainingRun.load(run_dir).skipped_steps == 3
    assert TrainingRun.load(run_dir).checkpoints == kept


def test_accepted_step_ends_a_streak(options, tmp_path, pretrain_options, monkeypatch):
    with monkeypatch.context() as patched:
        before_steps(patched, {2: NAN})
        pretrain(options)
    record = record_at(options.run_dir, 6)
    assert record.guard["streak"] == [6]
    whole = pretrain_options(tmp_path / "whole", guards=THREE, data=options.data)
    before_steps(monkeypatch, dict.fromkeys((3, 4, 6), NAN))
    pretrain(whole)
    assert record_at(whole.run_dir, 6).guard == record.guard
    assert record_at(whole.run_dir, 6).hash == record.hash
