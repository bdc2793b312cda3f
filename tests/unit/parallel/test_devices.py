"""Which device a rank takes, and in what precision it multiplies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel import cpu, layout
from megatron_chameleon.parallel.acceleration import acceleration_report

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    """A GPU that a torch for CUDA sees none of."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(cpu, "_GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.usefixtures("old_driver")
def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch):
    for visible in (None, "0", "0,1"):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UserError, match="driver"), layout.distributed(ParallelOptions(), 0):
            pass
    states = {feature.name: feature.state for feature in acceleration_report(ROOT).features}
    assert states["CUDA"] == "broken"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hiding_the_devices_asks_for_the_cpu(old_driver, monkeypatch, hidden):
    assert cpu.unusable_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert cpu.unusable_gpu() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (old_driver / "nvidia0").unlink()
    assert cpu.unusable_gpu() is None


def device_of(monkeypatch, *, count, local_rank, torchrun):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return layout._prepare_device()


def test_a_rank_takes_the_device_of_its_local_rank(monkeypatch):
    for torchrun in (False, True):
        found = device_of(monkeypatch, count=4, local_rank=3, torchrun=torchrun)
        assert found == torch.device("cuda", 3)


def test_a_task_that_sees_one_device_takes_it(monkeypatch):
    """As started by srun --gpus-per-task=1; torchrun's ranks would share it."""
    found = device_of(monkeypatch, count=1, local_rank=3, torchrun=False)
    assert found == torch.device("cuda", 0)
    with pytest.raises(UserError, match="--nproc-per-node 1"):
        device_of(monkeypatch, count=1, local_rank=3, torchrun=True)
    with pytest.raises(UserError, match="--nproc-per-node 2"):
        device_of(monkeypatch, count=2, local_rank=2, torchrun=False)


def test_fp32_is_fp32_whatever_the_container_asks_for():
    code = (
        "import json, torch\n"
        "from megatron_chameleon.parallel import layout\n"
        "from megatron_chameleon.parallel.acceleration import _float32\n"
        "precision = lambda: torch.get_float32_matmul_precision()\n"
        "report, before = _float32().detail, precision()\n"
        "layout._prepare_device()\n"
        "print(json.dumps([report, before, precision(), torch.backends.cuda.matmul.allow_tf32]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    report, before, after, allowed = json.loads(done.stdout)
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in report
    assert before == "high"
    assert after == "highest"
    assert not allowed
