"""Checks of the CPU stand-in, which changes torch for the rest of a process; see test_cpu.py."""

from __future__ import annotations

import logging
from unittest import mock

import torch

from megatron_chameleon.parallel import cpu, layout

CPU = torch.device("cpu")


def check_fp32_is_not_tf32_whatever_the_container_sets() -> None:
    assert torch.get_float32_matmul_precision() == "high"
    assert layout._prepare_device() == CPU
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def check_device_calls_and_constructors() -> None:
    plain = torch.zeros
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert cpu.install_cpu_stand_in() is False
    assert torch.zeros is plain
    assert cpu.install_cpu_stand_in() is True
    installed = torch.zeros
    assert cpu.install_cpu_stand_in() is True
    assert torch.zeros is installed
    assert torch.empty(2, device=torch.cuda.current_device()).device == CPU
    torch.cuda.synchronize(device=0)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert torch.tensor([1.5], device=device).device == CPU
        assert torch.zeros(2, 3, device=device).device == CPU
        assert torch.ones(2, device=device, dtype=torch.int64).dtype == torch.int64
        assert torch.empty(2, device=device).shape == (2,)
        assert torch.empty_like(torch.zeros(4), device=device).shape == (4,)
    assert torch.zeros(2, device="meta").device.type == "meta"
    tensor = torch.zeros(2, device=None)
    assert tensor.cuda(0, non_blocking=True) is tensor


def check_tensor_types() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type(dtype=torch.int32).dtype == torch.int32


def check_random_state() -> None:
    """Streams of megatron's tracker are independent of the default one, and resume."""
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.manual_seed(7)
    expected_outside = torch.rand(4)
    state = torch.cuda.get_rng_state(device="cuda")
    assert torch.equal(state, torch.cuda.random.get_rng_state())
    torch.manual_seed(2)
    expected_inside = torch.rand(4)
    torch.manual_seed(7)
    outside, inside = [], []
    logger = logging.getLogger(megatron_random.__name__)
    with mock.patch.object(logger, "handle") as handle:
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("stream", 2)
        for _ in range(2):
            outside.append(torch.rand(2))
            with tracker.fork("stream"):
                inside.append(torch.rand(2))
    assert handle.called
    for (record,), _ in handle.call_args_list:  # the warning about the CPU generator is dropped
        assert not logger.filter(record), record
    assert torch.equal(torch.cat(outside), expected_outside)
    assert torch.equal(torch.cat(inside), expected_inside)
    torch.cuda.set_rng_state(state, "cuda")
    assert torch.equal(torch.get_rng_state(), state)


def check_fused_functions() -> None:
    """A compiled function would run its Python code only once."""
    calls = []

    @torch.compile
    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x * 2

    for _ in range(3):
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [False] * 3


if __name__ == "__main__":
    check_device_calls_and_constructors()
    check_fp32_is_not_tf32_whatever_the_container_sets()
    check_tensor_types()
    check_random_state()
    check_fused_functions()
