"""Skipped steps, validation, early exit, determinism and traces of runs."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord, EvaluationResult, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexity
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training import trainer
from megatron_chameleon.training.checkpointing import find_progress
from megatron_chameleon.training.options import (
    GuardOptions,
    ProfilingOptions,
    StoppingOptions,
    ValidationOptions,
)
from megatron_chameleon.training.trainer import pretrain
from tests.device_reads import device_reads
from tests.small_corpus import DOMAINS
from tests.unit.training.bad_steps import before_steps, poison

TOKENS_PER_STEP = 8 * 32


def metrics_of(run_dir):
    return {record["step"]: record for record in TrainingRun.load(run_dir).metrics()}


def losses_of(run_dir):
    return {
        s: (r["loss"], r["domain_loss"], r["grad_norm"]) for s, r in metrics_of(run_dir).items()
    }


def weights_of(checkpoint):
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(checkpoint), layout)
        return [parameter.detach().clone() for parameter in reader.model.parameters()]


def test_a_gradient_that_is_infinite_in_the_last_step_is_left_out(
    pretrain_options, finished_run, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    before_steps(monkeypatch, {6: poison(torch.inf)})
    pretrain(pretrain_options(run_dir))
    run, records = TrainingRun.load(run_dir), metrics_of(run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("finished", 6, 1)
    assert [record["skipped_steps"] for record in records.values()] == [0, 0, 0, 1]
    (skipped,) = records[6]["skipped"]
    assert skipped["step"] == 6
    assert skipped["reason"].startswith("the gradient's norm is ")
    assert sum(skipped["domain_samples"].values()) == 8
    assert "step 6 skipped: the gradient's norm is " in capsys.readouterr().out
    # The interval tells of step 5 alone; data and learning rate went on.
    assert records[6]["loss"] != metrics_of(finished_run)[6]["loss"]
    assert sum(records[6]["domain_tokens"].values()) == TOKENS_PER_STEP
    assert sum(records[6]["domain_tokens_drawn"].values()) == 2 * TOKENS_PER_STEP
    assert records[6]["lr"] == metrics_of(finished_run)[6]["lr"]
    weights, expected = (weights_of(step_folder(r, 6)) for r in (run_dir, finished_run))
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert not all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_too_many_in_a_row_end_the_run_at_a_checkpoint_from_before_them(
    pretrain_options, finished_run, tmp_path, monkeypatch
):
    run_dir, guards = tmp_path / "run", GuardOptions(max_consecutive_skipped_steps=3)
    options = pretrain_options(run_dir, guards=guards)
    with monkeypatch.context() as patched:
        before_steps(patched, {number: poison(torch.nan) for number in (4, 5, 6)})
        with pytest.raises(UserError, match="3 steps in a row were skipped, 4 to 6") as rejected:
            pretrain(options)
    assert str(step_folder(run_dir, 3)) in str(rejected.value)
    for name in DOMAINS:
        assert f"{name} (" in str(rejected.value)
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("failed", 6, 3)
    assert run.checkpoints == ["checkpoints/step-00000003"]
    assert metrics_of(run_dir)[4]["loss"] is None
    pretrain(options)
    assert losses_of(run_dir) == losses_of(finished_run)
    assert TrainingRun.load(run_dir).skipped_steps == 0


def test_validation_changes_nothing_and_is_what_evaluation_finds(
    pretrain_options, finished_run, corpus, tmp_path
):
    run_dir = tmp_path / "run"
    validation = ValidationOptions(eval_interval=2)
    pretrain(pretrain_options(run_dir, validation=validation))
    assert losses_of(run_dir) == losses_of(finished_run)
    records = metrics_of(run_dir)
    assert [s for s, record in records.items() if "validation_loss" in record] == [2, 4, 6]
    assert "validation" in records[6]["phase_seconds"]
    result = evaluate_perplexity(
        PerplexityOptions(
            corpus=corpus.root, checkpoint=run_dir, output=tmp_path / "valid.json", split="valid"
        )
    )
    assert isinstance(result, EvaluationResult)
    found = records[6]["validation_loss"]
    assert found == pytest.approx({n: d.loss for n, d in result.domains.items()}, abs=1e-6)
    extra = TrainingRun.load(run_dir).cost.flops - TrainingRun.load(finished_run).cost.flops
    assert extra == pytest.approx(3 * result.cost.flops)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    pretrain_options, finished_run, tmp_path, monkeypatch, capsys, number
):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), number)})
        pretrain(pretrain_options(run_dir))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.stopped_by) == ("interrupted", 4, number.name)
    assert run.checkpoints[-1] == "checkpoints/step-00000004"
    said = capsys.readouterr().out
    assert f"stopped by {number.name} at step 4 of 6; run the same command again to resume" in said
    pretrain(pretrain_options(run_dir))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.stopped_by) == ("finished", None)
    assert losses_of(run_dir) == losses_of(finished_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_the_first_step_leaves_the_folder_as_it_was(
    pretrain_options, trained_run, tmp_path, monkeypatch, capsys, number
):
    def signalled(*arguments):
        os.kill(os.getpid(), number)
        return find_progress(*arguments)

    monkeypatch.setattr(f"{pretrain.__module__}.find_progress", signalled)
    before = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    pretrain(pretrain_options(trained_run, overwrite=True))
    assert f"stopped by {number.name} before step 1 of 6" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    assert after == before
    pretrain(pretrain_options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_when_its_time_is_up(pretrain_options, tmp_path, capsys):
    stopping = StoppingOptions(exit_duration_in_mins=1e-6)
    pretrain(pretrain_options(tmp_path / "run", stopping=stopping))
    run = TrainingRun.load(tmp_path / "run")
    assert (run.status, run.step, run.stopped_by) == ("interrupted", 1, "--exit-duration-in-mins")
    assert run.checkpoints == ["checkpoints/step-00000001"]
    assert "stopped by --exit-duration-in-mins at step 1 of 6" in capsys.readouterr().out


def test_a_deterministic_run_with_a_trace_is_the_same_run(pretrain_options, finished_run, tmp_path):
    profiling = ProfilingOptions(profile=True, profile_step_start=1, profile_step_end=2)
    run_dir = tmp_path / "run"
    pretrain(pretrain_options(run_dir, deterministic=True, profiling=profiling))
    assert losses_of(run_dir) == losses_of(finished_run)
    assert (run_dir / "profile" / "steps-2-to-2.json").stat().st_size > 10_000


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_of_a_run_waits_for_the_device_once(pretrain_options, tmp_path, monkeypatch, masked):
    """The data, the guard and what the ranks agree on included."""
    waits, run_step = [], trainer.Trainer._run_step

    def counting(trainer):
        host = [trainer.sync._host]
        waits.append(device_reads(lambda: run_step(trainer), monkeypatch, on_host=host))

    monkeypatch.setattr(trainer.Trainer, "_run_step", counting)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    guards = GuardOptions(spike_factor=6.0)
    pretrain(pretrain_options(tmp_path / "run", boundaries=boundaries, guards=guards))
    assert waits == [1] * 6
