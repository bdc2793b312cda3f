"""Runs that a hook watches: what a skipped step, a checkpoint and a planned mixture mean for it."""

from __future__ import annotations

import contextlib
import math
import os
import signal

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, TrainingRun
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.blend.prefetch import prefetch
from megatron_chameleon.errors import UserError
from megatron_chameleon.training import hook as hook_module
from megatron_chameleon.training import trainer
from megatron_chameleon.training.domain_gradients import GradientRows
from megatron_chameleon.training.hook import GlobalBatch, TrainingHook
from megatron_chameleon.training.trainer import pretrain
from tests.distributed.toy_hooks import GradientCombiner, LossWeigher, MixtureChanger
from tests.unit.training.bad_steps import before_steps, run_out


class Counter(TrainingHook):
    """Counts steps, in a state that it hands out and goes on with."""

    def __init__(self, *_run):
        super().__init__()
        self.counts = {"steps": 0}

    def loss_weights(self, batch):
        self.counts["steps"] += 1

    def state_dict(self):
        return self.counts

    def load_state_dict(self, state):
        self.counts = state


def hook_states(run_dir):
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    records = map(CheckpointRecord.load, folders)
    return {record.step: record.hook.state for record in records if record.hook}


def nan_losses(monkeypatch, bad_step):
    """Every loss that a hook looks at in one step is NaN, as of a bad batch."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, *arguments):
        factor = math.nan if batch.step + 1 == bad_step else 1.0
        return [factor * part for part in token_losses(batch, *arguments)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


def test_losses_that_are_no_numbers_cost_a_hook_that_step_alone(
    pretrain_options, tmp_path, monkeypatch
):
    nan_losses(monkeypatch, bad_step=3)
    run_dir = tmp_path / "run"
    pretrain(pretrain_options(run_dir, log_interval=1, save_interval=2), LossWeigher)
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("finished", 6, 1)
    weights = [record["hook"]["weights"] for record in run.metrics()]
    assert weights[2] == weights[1]
    assert weights[3] != weights[2]
    assert hook_states(run_dir)[6]["weights"] == weights[5]
    # Looking at the losses that were no numbers was not for nothing.
    flops = [record["hook"]["flops"] for record in run.metrics()]
    assert flops == [step * flops[0] for step in range(1, 7)]


@pytest.mark.parametrize("bad", [{1, 2}, math.nan])
def test_a_state_that_no_checkpoint_holds_is_told_at_once(pretrain_options, tmp_path, bad):
    class Unsavable(TrainingHook):
        def __init__(self, *_run):
            super().__init__()

        def state_dict(self):
            return {"weights": bad}

    with pytest.raises(UserError, match=r"Unsavable\.state_dict\(\) is not JSON-serializable"):
        pretrain(pretrain_options(tmp_path / "run"), Unsavable)
    assert TrainingRun.load(tmp_path / "run").step == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            DataOptions(permutation="epoch", mixture_change=(("4=uniform",),)),
            "override --mixture-change",
        ),
        (DataOptions(), "needs --permutation epoch"),
    ],
)
def test_a_hook_alone_changes_the_mixture_or_nothing_is_touched(
    pretrain_options, trained_run, data, said
):
    before = sorted(path.stat().st_mtime_ns for path in trained_run.rglob("*"))
    with pytest.raises(UserError, match=said):
        pretrain(pretrain_options(trained_run, data=data, overwrite=True), MixtureChanger)
    assert sorted(path.stat().st_mtime_ns for path in trained_run.rglob("*")) == before


@pytest.mark.parametrize("hook", [None, Counter])
def test_a_run_goes_on_with_the_hook_that_it_began_with(
    pretrain_options, tmp_path, monkeypatch, hook
):
    options = pretrain_options(tmp_path / "run")
    before_steps(monkeypatch, {2: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
    pretrain(options, LossWeigher)
    with pytest.raises(UserError, match="LossWeigher"):
        pretrain(options, hook)


class Large(Counter):
    """Holds memory as long as a run is trained."""

    def extra_bytes(self, setup, stage, num_domains):
        return {"a large thing": 3 * 10**9}


class LargeAtLast(Large):
    prepare = run_out


def test_hook_that_does_not_fit_is_an_error_before_anything_is_written(pretrain_options, tmp_path):
    with pytest.raises(UserError, match=r"out of memory: .*\(.*a large thing 3\.0"):
        pretrain(pretrain_options(tmp_path / "run"), LargeAtLast)
    assert not (tmp_path / "run").exists()


def test_the_dry_step_finds_the_gradients_of_all_domains_beside_it(
    pretrain_options, tmp_path, monkeypatch
):
    rows = []

    class Rows(GradientRows):
        def __init__(self, model, count):
            super().__init__(model, count)
            rows.append(count)

    def dry_step(*_arguments):
        assert rows == [3]
        rows.append(0)

    monkeypatch.setattr(hook_module, "GradientRows", Rows)
    monkeypatch.setattr(trainer, "dry_first_step", dry_step)
    pretrain(pretrain_options(tmp_path / "run", dry_first_step="on"), GradientCombiner)
    assert rows == [3, 0]


def test_reading_ahead_draws_by_the_mixture_that_the_hook_has_chosen(
    pretrain_options, tmp_path, monkeypatch
):
    """Also where the run goes on at the step before which it is changed."""
    data = DataOptions(permutation="epoch")
    plain, ahead = (
        pretrain_options(tmp_path / name, train_iters=10, log_interval=1, data=data)
        for name in ("plain", "ahead")
    )
    pretrain(plain, MixtureChanger)
    parts = []

    def read_ahead(batches, device, given):  # as on a GPU
        parts.append(given)
        return contextlib.closing(prefetch(batches, device, given))

    monkeypatch.setattr(trainer, "read_ahead", read_ahead)
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(ahead, MixtureChanger)
    pretrain(ahead, MixtureChanger)
    assert parts == [[8, 8, 4], [8, 4]]  # two micro-batches a step
    sampled, losses = (
        [
            [record[name] for record in TrainingRun.load(options.run_dir).metrics()]
            for options in (plain, ahead)
        ]
        for name in ("domain_tokens_drawn", "domain_loss")
    )
    assert sampled[0] == sampled[1]
    assert losses[0] == losses[1]
    assert sampled[0][-1] != sampled[0][0]
