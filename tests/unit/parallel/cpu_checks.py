"""Checks of the CPU stand-in, in a process of their own: it changes torch. See test_cpu.py."""

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


def check_installation() -> None:
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert cpu.install_cpu_stand_in() is False
    assert cpu.install_cpu_stand_in() is True
    installed = torch.zeros
    assert cpu.install_cpu_stand_in() is True
    assert torch.zeros is installed
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert torch.tensor([1.5], device=device).device == CPU
    assert torch.zeros(2, device="meta").device.type == "meta"


def check_random_state() -> None:
    """Check that streams of megatron's tracker are independent of the default stream."""
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
    """Check that functions are not compiled: compiled ones would run their code only once."""
    calls = []

    @torch.compile
    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x * 2

    for _ in range(3):
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [False] * 3


if __name__ == "__main__":
    check_installation()
    check_fp32_is_not_tf32_whatever_the_container_sets()
    check_random_state()
    check_fused_functions()
