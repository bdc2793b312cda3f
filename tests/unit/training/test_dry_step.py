"""The dry first step: the memory of a real step, and no effect on training."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.checkpoint.state import random_states
from megatron_chameleon.cli import run_tool
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training import memory, optimizer
from megatron_chameleon.training.checkpointing import find_progress
from megatron_chameleon.training.memory import dry_first_step
from megatron_chameleon.training.optimizer import build_trained_model
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.peak_memory import peak_bytes
from tests.unit.training.bad_steps import run_out

TOLERANCE = 0.01
SHARDED = TrainingParallelOptions(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
APART = DocumentBoundaryOptions(reset_attention_mask=True, eod_mask_loss=True)


def state_of(model):
    """Name -> value of everything that a step changes."""
    found: dict[str, Any] = {f"random {name}": state for name, state in random_states().items()}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            found[f"weight {name}"] = parameter.detach()
            found[f"gradient {name}"] = parameter.main_grad
            found[f"own gradient {name}"] = parameter.grad
        for number, group in enumerate(chunk.bucket_groups):
            for field, value in vars(group).items():
                if not isinstance(value, (list, set)) and "bucket" not in field:
                    found[f"{field} {number}"] = value.copy() if isinstance(value, dict) else value
    for part in model.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = part.optimizer.state.get(parameter, {})
                found |= {f"{key} {number} {group['wd_mult']}": v for key, v in state.items()}
                found[f"main gradient {number} {group['wd_mult']}"] = parameter.grad
        found["states"] = len(part.optimizer.state)
    found["accepts"] = model.optimizer.accepts
    found["schedule"] = model.scheduler.state_dict()
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in found.items()}


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("parallel", "bf16"), [(TrainingParallelOptions(), True), (SHARDED, False), (SHARDED, True)]
)
@pytest.mark.parametrize("resumed", [False, True])
def test_dry_step_changes_nothing(pretrain_options, tmp_path, parallel, bf16, resumed):
    options = pretrain_options(tmp_path / "run", bf16=bf16, parallel=parallel)
    if resumed:
        pretrain(dataclasses.replace(options, train_iters=6))
        shutil.rmtree(step_folder(options.run_dir, 6))
    plan = plan_training(options)
    with distributed(parallel, seed=0) as layout:
        progress = find_progress(plan, layout)
        model = build_trained_model(plan, layout, progress.checkpoint if resumed else None)
        before = state_of(model)
        dry_first_step(plan, layout, model)
        after = state_of(model)
    assert after.keys() == before.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    assert (before["states"] > 0) == resumed


@pytest.mark.parametrize("boundaries", [DocumentBoundaryOptions(), APART])
@pytest.mark.parametrize("bf16", [False, True])
def test_dry_step_peaks_at_the_memory_of_real_steps(pretrain_options, tmp_path, bf16, boundaries):
    options = pretrain_options(tmp_path / "run", bf16=bf16, boundaries=boundaries)
    plan = plan_training(options)
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        dry, real = (build_trained_model(plan, layout) for _ in range(2))
        taken = peak_bytes(lambda: dry_first_step(plan, layout, dry))
        batches = memory._random_batches(plan, 2 * real.passes.shape.num_microbatches)
        passes = functools.partial(real.passes.forward_backward, batches)

        def two_steps():
            for _ in range(2):
                real.step(passes)

        assert taken == pytest.approx(peak_bytes(two_steps), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("where", "name", "parallel", "number"),
    [
        (optimizer, "data_parallel", TrainingParallelOptions(), 1),  # allocates the gradients
        (torch, "zeros_like", TrainingParallelOptions(), 1),  # allocates the moments
        (layers, "prepare_input_tensors_for_wgrad_compute", SHARDED, 2),
    ],
    ids=["building", "moments", "backward"],
)
def test_out_of_memory_ends_the_command_before_anything_is_written(
    pretrain_options, tmp_path, monkeypatch, capsys, where, name, parallel, number
):
    options = pretrain_options(tmp_path / "run", dry_first_step="on", parallel=parallel)
    original, calls = getattr(where, name), itertools.count(1)

    def call(*arguments, **more):
        return original(*arguments, **more) if next(calls) < number else run_out()

    def start(_options):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, call)
            pretrain(options)

    with pytest.raises(SystemExit) as left:
        run_tool(start, PretrainOptions, ["--run-dir", str(options.run_dir), "--corpus", "x"])
    message = capsys.readouterr().err.splitlines()[-1]  # after warnings of torch
    assert left.value.code == 2
    assert message.startswith("error: out of memory: try --")
    assert not options.run_dir.exists()
