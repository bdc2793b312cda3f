"""CPU stand-in of torch.cuda; tests/unit/training trains with the stand-in."""

from __future__ import annotations

import logging

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_chameleon.parallel import cpu, layout

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _stand_in():
    """Install the stand-in, unless another test of this process has already installed it."""
    assert cpu.install_cpu_stand_in() is True


def test_cuda_tensors_are_created_on_the_cpu(monkeypatch):
    installed = torch.zeros
    assert cpu.install_cpu_stand_in() is True
    assert torch.zeros is installed  # not replaced again
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert torch.tensor([1.5], device=device).device == CPU
    assert torch.zeros(2, device="meta").device.type == "meta"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.install_cpu_stand_in() is False


def test_fp32_is_not_tf32_regardless_of_the_container():
    torch.set_float32_matmul_precision("high")  # NVIDIA's containers set this by default
    assert layout._prepare_device() == CPU
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_streams_of_megatrons_tracker_are_independent_of_the_default_stream(caplog):
    torch.cuda.manual_seed(7)
    expected_outside = torch.rand(4)
    state = torch.cuda.get_rng_state(device="cuda")
    assert torch.equal(state, torch.cuda.random.get_rng_state())
    torch.manual_seed(2)
    expected_inside = torch.rand(4)
    torch.manual_seed(7)
    outside, inside = [], []
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("stream", 2)
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            outside.append(torch.rand(2))
            with tracker.fork("stream"):
                inside.append(torch.rand(2))
    assert not caplog.records  # megatron warns that the CPU generator advances
    assert torch.equal(torch.cat(outside), expected_outside)
    assert torch.equal(torch.cat(inside), expected_inside)
    torch.cuda.set_rng_state(state, "cuda")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_cpu_stand_in_disables_the_compiler():
    """If the function were compiled, its Python code would run only once."""
    calls = []

    @torch.compile
    def doubled(x):
        calls.append(torch.compiler.is_compiling())
        return x * 2

    for _ in range(3):
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [False] * 3
