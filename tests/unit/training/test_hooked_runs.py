"""Runs with a training hook: skipped steps, resume, prefetch and mixture changes."""

from __future__ import annotations

import contextlib
import math
import os
import signal

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.blend.sampler import prefetch
from megatron_chameleon.errors import UserError
from megatron_chameleon.training import trainer
from megatron_chameleon.training.hook import GlobalBatch
from megatron_chameleon.training.trainer import pretrain
from tests.toy_hooks import LossWeigher, MixtureChanger
from tests.unit.training.bad_steps import before_steps
from tests.unit.training.runs import losses, metrics, record_at


def test_skipped_step_leaves_the_hook_unchanged(pretrain_options, tmp_path, monkeypatch):
    token_losses = GlobalBatch.token_losses

    def nan_in_step_3(batch, *arguments):
        factor = math.nan if batch.step == 2 else 1.0
        return [factor * part for part in token_losses(batch, *arguments)]

    monkeypatch.setattr(GlobalBatch, "token_losses", nan_in_step_3)
    run_dir = tmp_path / "run"
    pretrain(pretrain_options(run_dir, log_interval=1), LossWeigher)
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("finished", 6, 1)
    logged = [line["hook"] for line in metrics(run_dir).values()]
    weights = [line["weights"] for line in logged]
    assert weights[2] == weights[1]
    assert weights[3] != weights[2]
    hook = record_at(run_dir, 6).hook
    assert hook is not None
    assert hook.state["weights"] == weights[5]
    # The cost includes the skipped step.
    assert [line["flops"] for line in logged] == [n * logged[0]["flops"] for n in range(1, 7)]


@pytest.mark.parametrize("other", [None, MixtureChanger])
def test_run_resumes_only_with_its_own_hook(pretrain_options, tmp_path, monkeypatch, other):
    options = pretrain_options(tmp_path / "run", data=DataOptions(permutation="epoch"))
    before_steps(monkeypatch, {2: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
    pretrain(options, LossWeigher)
    with pytest.raises(UserError, match="LossWeigher"):
        pretrain(options, other)


def test_prefetch_follows_the_mixture_of_the_hook(pretrain_options, tmp_path, monkeypatch):
    """The same if the run is resumed just before a change."""
    data = DataOptions(permutation="epoch")
    plain, ahead = (
        pretrain_options(tmp_path / name, train_iters=10, log_interval=1, data=data)
        for name in ("plain", "ahead")
    )
    pretrain(plain, MixtureChanger)
    chunks = []

    def read_ahead(batches, device, counts):  # as on a GPU
        chunks.append(counts)
        return contextlib.closing(prefetch(batches, device, counts))

    monkeypatch.setattr(trainer, "read_ahead", read_ahead)
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(ahead, MixtureChanger)
    pretrain(ahead, MixtureChanger)
    assert chunks == [[8, 8, 4], [8, 4]]  # two micro-batches per step
    assert losses(plain.run_dir) == losses(ahead.run_dir)
    sampled, again = (
        [line["domain_tokens_drawn"] for line in metrics(options.run_dir).values()]
        for options in (plain, ahead)
    )
    assert sampled == again
    assert sampled[-1] != sampled[0]
