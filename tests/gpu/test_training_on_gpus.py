"""Pretraining on one or several GPUs gives the losses of the CPU of the same machine."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.model.config import ModelConfig, preset
from megatron_chameleon.model.memory import TrainingSetup, peak_bytes_per_rank
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from tests.gpu.conftest import IS_SIMULATED, STEPS, Tools, losses
from tests.peak_memory import STEPS as MEASURED_STEPS
from tests.peak_memory import training_step

# GPU and CPU add numbers in different orders, and 12 steps amplify the difference; bf16 rounds
# every activation to 8 significant bits.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 2e-2

BF16, MASKS = ("--bf16",), ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
FLEX = (*MASKS, "--document-attention", "flex")
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
VALIDATION = ("--eval-interval", "6", "--eval-iters", "2")
EVERY_6 = ("--permutation", "epoch", "--online-interval", "6")
ONLINE = (*EVERY_6, "--online", "chameleon", "--online-windows", "4")
ODM = (*EVERY_6, "--online", "odm")
ADO = (*EVERY_6, "--online", "ado", "--online-warmup-iters", "0")
AIOLI = (*EVERY_6, "--online", "aioli", "--aioli-steps", "1", "--aioli-sweeps", "1")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")

# Case -> flags of the run on GPUs, its number of ranks, and flags of the reference run on the CPU.
# The reference run has only those flags that change losses.
CASES: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "fp32": ((), 1, ()),
    "bf16": (BF16, 1, BF16),
    "sharded": (OVERLAPPED[:1], 1, ()),
    "async-save": (("--async-save",), 1, ()),
    "compiled": (("--compile-layers",), 1, ()),
    "masks": (MASKS, 1, MASKS),
    "flex": (FLEX, 1, MASKS),
    "flex-compiled": ((*FLEX, "--compile-layers"), 1, MASKS),
    "flex-recomputation-bf16": (
        (*BF16, *FLEX, "--recompute-granularity", "full"),
        1,
        (*BF16, *MASKS),
    ),
    "recomputation": (("--recompute-granularity", "full"), 1, ()),
    "selective-recomputation": (("--recompute-granularity", "selective"), 1, ()),
    "validation": (VALIDATION, 1, VALIDATION),
    "online": (ONLINE, 1, ONLINE),
    "online-odm": (ODM, 1, ODM),
    "online-ado": (ADO, 1, ADO),
    "online-aioli": (AIOLI, 1, AIOLI),
    "data-parallel": ((), 2, ()),
    "overlapped-async-save": ((*OVERLAPPED, "--async-save"), 2, ()),
    "bf16-overlapped": ((*BF16, *OVERLAPPED), 2, BF16),
    "tensor-sequence": (TENSOR, 2, ()),
    "tensor-masks": ((*TENSOR, *MASKS), 2, MASKS),
    "tensor-flex": ((*TENSOR, *FLEX), 2, MASKS),
    "pipeline": (PIPELINE, 2, ()),
    "interleaved": (INTERLEAVED, 2, ()),
    "tensor-pipeline": ((*TENSOR, *PIPELINE), 4, ()),
}


@pytest.mark.parametrize(("flags", "ranks", "same_on_cpu"), CASES.values(), ids=CASES)
def test_losses_are_those_of_the_cpu(
    tools: Tools, tmp_path: Path, flags: tuple[str, ...], ranks: int, same_on_cpu: tuple[str, ...]
) -> None:
    run = tools.pretrain(tmp_path / "run", *flags, ranks=ranks)
    expected = tools.reference(*same_on_cpu)
    tolerance = BF16_TOLERANCE if "--bf16" in flags else FP32_TOLERANCE
    assert run.status == "finished"
    assert len(losses(run)) == STEPS
    assert losses(run)[0] - losses(run)[-1] > tolerance
    for line, other in zip(run.metrics(), expected.metrics(), strict=True):
        # Compare the total loss, the losses of domains, and the validation loss.
        for name in (name for name in other if "loss" in name):
            assert line[name] == pytest.approx(other[name], abs=tolerance), name
    CheckpointRecord.load(step_folder(run.root, STEPS)).verify()


@pytest.mark.parametrize(
    ("first", "second", "flags", "ranks"),
    [
        ("cpu", "gpu", (), 1),
        ("gpu", "cpu", (), 1),
        ("gpu", "gpu", ("--deterministic",), 1),
        ("gpu", "gpu", (*OVERLAPPED, "--async-save"), 2),
    ],
)
def test_a_run_is_resumed_on_either_device(
    tools: Tools, tmp_path: Path, first: str, second: str, flags: tuple[str, ...], ranks: int
) -> None:
    """With --deterministic, the losses are bit-identical."""
    whole = tools.pretrain(tmp_path / "whole", *flags, ranks=ranks, on_cpu=first == "cpu")
    resumed = tmp_path / "resumed"
    shutil.copytree(whole.root, resumed)
    shutil.rmtree(step_folder(resumed, STEPS))
    run = tools.pretrain(resumed, *flags, ranks=ranks, on_cpu=second == "cpu")
    assert run.status == "finished"
    if "--deterministic" in flags:
        assert losses(run) == losses(whole)
    np.testing.assert_allclose(losses(run), losses(whole), atol=FP32_TOLERANCE)


def setup_of(shape: ModelConfig, *, bf16: bool, micro_batch_size: int) -> TrainingSetup:
    serial, length = TrainingParallelOptions(), shape.max_sequence_length
    return TrainingSetup(shape, serial, 1, micro_batch_size, 2, bf16, length)


@pytest.mark.skipif(IS_SIMULATED, reason="the simulated device has no allocator")
@pytest.mark.parametrize(
    ("size", "bf16", "micro_batch_size"),
    [("82m", False, 8), ("82m", True, 16), ("210m", True, 8), ("684m", True, 4)],
)
def test_the_memory_estimate_is_near_the_allocators_peak(
    size: str, bf16: bool, micro_batch_size: int
) -> None:
    """The models include head dimensions 48 (210m) and 50 (684m)."""
    shape = preset(size, 50_257, 1024)
    setup = setup_of(shape, bf16=bf16, micro_batch_size=micro_batch_size)
    gc.collect()
    with distributed(setup.parallel, seed=0) as layout:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = training_step(setup, layout)
        for _ in range(MEASURED_STEPS):
            step()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak_bytes_per_rank(setup) == pytest.approx(peak, rel=0.1)


@pytest.mark.skipif(IS_SIMULATED, reason="tests/simulated_cuda counts synchronizations")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_waits_for_the_gradients_norm_alone(
    monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """After the first step, CUDA raises an error if anything but the gradient norm synchronizes."""
    norm = ChainedOptimizer.get_grad_norm

    def norm_that_waits(optimizer: ChainedOptimizer) -> float:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return norm(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(ChainedOptimizer, "get_grad_norm", norm_that_waits)
    setup = setup_of(ModelConfig(2, 4, 200, 400, 1000, 64), bf16=bf16, micro_batch_size=2)
    with distributed(setup.parallel, seed=0) as layout:
        step = training_step(setup, layout)
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
