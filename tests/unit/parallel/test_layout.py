"""Parallel layouts that cannot run, and the device of a rank."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

import pytest
import torch

from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig, preset
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.parallel import cpu, layout
from megatron_chameleon.parallel.options import (
    ParallelOptions,
    RecomputeOptions,
    TrainingParallelOptions,
)
from megatron_chameleon.training.options import PretrainOptions
from tests.unit.training.runs import OVERLAPPED

RUN = functools.partial(PretrainOptions, run_dir=Path("x"), corpus=Path("x"))
APART = DocumentBoundaryOptions(reset_attention_mask=True)
SIZE = preset("124m", vocab_size=100, max_sequence_length=16)
FOUR_LAYERS = ModelConfig(4, 4, 32, 48, vocab_size=100, max_sequence_length=16)


@pytest.mark.parametrize(
    ("kind", "options", "flag"),
    [
        (TrainingParallelOptions, {"sequence_parallel": True}, "--sequence-parallel"),
        (
            TrainingParallelOptions,
            {"num_virtual_stages_per_pipeline_rank": 2},
            "--pipeline-model-parallel-size",
        ),
        (RecomputeOptions, {"recompute_method": "block"}, "--recompute-method block"),
        (RUN, {"compile_layers": True, "parallel": OVERLAPPED}, "--overlap-param-gather"),
        (
            RUN,
            {"compile_layers": True, "hidden_dropout": 0.1},
            "--hidden-dropout 0.1.*--compile-layers",
        ),
        (RUN, {"document_attention": "flex"}, "--document-attention flex.*--reset-attention-mask"),
        (
            RUN,
            {"boundaries": APART, "document_attention": "flex", "attention_dropout": 0.1},
            "--attention-dropout 0.1.*--document-attention flex",
        ),
    ],
)
def test_contradicting_options_are_rejected(kind, options, flag):
    with pytest.raises(UserError, match=flag):
        kind(**options)


def full(num_layers, method=None):
    return {"recompute": RecomputeOptions("full", method, num_layers)}


VIRTUAL = {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("size", "options", "seq_length", "fix"),
    [
        (SIZE, {"tensor_model_parallel_size": 5}, 1024, "1, 2, 3, 4, 6, 12 do"),
        (SIZE, VIRTUAL | {"num_virtual_stages_per_pipeline_rank": 4}, 1024, "1, 2, 3, 6 do"),
        (SIZE, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, 1023, "-size 4"),
        (FOUR_LAYERS, full(3), 16, "--recompute-num-layers 3"),
        (FOUR_LAYERS, VIRTUAL | full(2), 16, "--recompute-num-layers 2"),
    ],
)
def test_a_model_that_cannot_be_partitioned_is_rejected(size, options, seq_length, fix):
    with pytest.raises(UserError, match=fix):
        check_model_layout(size, TrainingParallelOptions(**options), seq_length)


def test_interleaving_needs_a_multiple_of_the_pipeline_size_of_micro_batches():
    options = TrainingParallelOptions(
        pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=3
    )
    options.check_microbatches(8)
    with pytest.raises(UserError, match="--pipeline-model-parallel-size 4"):
        options.check_microbatches(6)
    TrainingParallelOptions(pipeline_model_parallel_size=4).check_microbatches(6)


def test_an_unusable_gpu_is_an_error_unless_cuda_visible_devices_hides_it(tmp_path, monkeypatch):
    """A torch built for CUDA may be unable to use the GPU, for example because of an old driver."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(cpu, "_GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="driver"), layout.distributed(ParallelOptions(), 0):
        pass
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert cpu.unusable_gpu() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cpu.unusable_gpu()


@pytest.mark.parametrize(
    ("count", "local_rank", "torchrun", "index"),
    [
        (4, 3, True, 3),
        (1, 3, False, 0),  # srun --gpus-per-task=1
        (1, 3, True, None),
    ],
)
def test_each_rank_uses_the_device_of_its_local_rank(
    monkeypatch, count, local_rank, torchrun, index
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if index is None:
        with pytest.raises(UserError, match=f"--nproc-per-node {count}"):
            layout._prepare_device()
    else:
        assert layout._prepare_device() == torch.device("cuda", index)


def test_a_port_in_use_is_an_error_that_names_it(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with (
            pytest.raises(UserError, match=f"MASTER_PORT={port}"),
            layout.distributed(ParallelOptions(), seed=1),
        ):
            pass
