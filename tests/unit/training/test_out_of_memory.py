"""Test the dry first step: its peak memory, and out-of-memory errors before training."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.cli import run_tool
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training import optimizer, out_of_memory
from megatron_chameleon.training.optimizer import build_trained_model
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.out_of_memory import dry_first_step
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.peak_memory import peak_bytes
from tests.random_training import train_step
from tests.unit.training.runs import OVERLAPPED, run_out

TOLERANCE = 0.01
APART = DocumentBoundaryOptions(reset_attention_mask=True, eod_mask_loss=True)


@pytest.mark.parametrize(
    ("bf16", "boundaries"), [(False, DocumentBoundaryOptions()), (True, APART)]
)
def test_dry_step_peaks_at_the_memory_of_real_steps(pretrain_options, tmp_path, bf16, boundaries):
    options = pretrain_options(tmp_path / "run", bf16=bf16, boundaries=boundaries)
    plan = plan_training(options)
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        dry, real = (build_trained_model(plan, layout) for _ in range(2))
        random_state = torch.get_rng_state()
        taken = peak_bytes(lambda: dry_first_step(plan, layout, dry))
        assert torch.equal(torch.get_rng_state(), random_state)
        batches = out_of_memory._random_batches(plan, 2 * real.passes.shape.num_microbatches)
        passes = functools.partial(real.passes.forward_backward, batches)

        def two_steps():
            for _ in range(2):
                train_step(real, passes)

        assert taken == pytest.approx(peak_bytes(two_steps), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("where", "name", "parallel", "number"),
    [
        (optimizer, "data_parallel", TrainingParallelOptions(), 1),  # allocates the gradients
        (torch, "zeros_like", TrainingParallelOptions(), 1),  # allocates the moments
        (layers, "prepare_input_tensors_for_wgrad_compute", OVERLAPPED, 2),
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
    message = capsys.readouterr().err.splitlines()[-1]  # torch's warnings precede this line
    assert left.value.code == 2
    assert message.startswith("error: out of memory: try --")
    assert not options.run_dir.exists()
