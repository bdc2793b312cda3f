"""Checks of the CPU stand-in, one per replacement, run in this order in a separate process.

Replacements change torch permanently, so each check runs before and after its replacement.
test_cpu.py runs it as ``python -m tests.unit.parallel.cpu_checks results.json``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_chameleon.parallel import cpu

CPU = torch.device("cpu")
REPLACEMENTS = (
    "replace_device_calls",
    "replace_random_state",
    "redirect_cuda_constructors",
    "report_cuda_tensor_types",
    "run_fused_functions_eagerly",
    "keep_freed_memory",
)


def check_a_machine_with_cuda_is_left_alone() -> None:
    before = torch_functions()
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert cpu.install_cpu_stand_in() is False
    assert torch_functions() == before


def check_device_calls() -> None:
    assert fails(torch.cuda.current_device)
    assert fails(torch.cuda.synchronize)
    cpu.replace_device_calls()
    assert torch.empty(2, device=torch.cuda.current_device()).device == CPU
    torch.cuda.synchronize()
    torch.cuda.synchronize(device=0)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()


def check_random_state() -> None:
    before = torch.get_rng_state()
    assert fails(lambda: torch.cuda.get_rng_state(device="cuda"))
    cpu.replace_random_state()
    assert torch.equal(torch.get_rng_state(), before)  # the replacement samples nothing
    torch.cuda.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state(device="cuda")
    assert torch.equal(state, torch.cuda.random.get_rng_state())
    assert torch.equal(torch.rand(3), drawn)
    torch.cuda.set_rng_state(state, "cuda")
    assert torch.equal(torch.rand(3), drawn)


def check_the_random_state_of_megatrons_tracker() -> None:
    """Its streams are independent of each other and of the default one, and resume."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(1)
    expected_outside = torch.rand(4)
    torch.manual_seed(2)
    expected_inside = torch.rand(4)

    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("stream", 2)
    outside, inside = [], []
    for _ in range(2):
        outside.append(torch.rand(2))
        with tracker.fork("stream"):
            inside.append(torch.rand(2))
    assert torch.equal(torch.cat(outside), expected_outside)
    assert torch.equal(torch.cat(inside), expected_inside)


def check_only_the_trackers_warning_about_the_cpu_generator_is_dropped() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(megatron_random.__name__)
    logger.addHandler(handler)
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("stream", 3)
    with tracker.fork("stream"):
        torch.rand(1)
    logger.warning("something else")
    logger.removeHandler(handler)
    assert heard == ["something else"]


def check_constructors() -> None:
    assert fails(lambda: torch.zeros(2, device="cuda"))
    assert fails(torch.zeros(2).cuda)
    cpu.redirect_cuda_constructors()
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert torch.tensor([1.5], device=device).device == CPU
        assert torch.zeros(2, 3, device=device).device == CPU
        assert torch.ones(2, device=device, dtype=torch.int64).dtype == torch.int64
        assert torch.empty(2, device=device).shape == (2,)
        assert torch.empty_like(torch.zeros(4), device=device).shape == (4,)
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2, device=None).device == CPU
    assert torch.equal(torch.tensor([1, 2]), torch.arange(1, 3))
    tensor = torch.zeros(2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor


def check_tensor_types() -> None:
    assert torch.zeros(1).type() == "torch.FloatTensor"
    cpu.report_cuda_tensor_types()
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.nn.Parameter(torch.zeros(1)).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type(dtype=torch.int32).dtype == torch.int32


def check_fused_functions() -> None:
    """A compiled function would run its Python code only once."""
    calls = []

    @torch.compile
    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x * 2

    cpu.run_fused_functions_eagerly()
    for _ in range(3):
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [False] * 3


def check_every_replacement_is_installed_once() -> None:
    """They are in place in this process already, so mocks are called."""
    with contextlib.ExitStack() as stack:
        replacements = [stack.enter_context(mock.patch.object(cpu, name)) for name in REPLACEMENTS]
        assert cpu.install_cpu_stand_in() is True
        assert cpu.install_cpu_stand_in() is True
    assert [replacement.call_count for replacement in replacements] == [1] * len(REPLACEMENTS)


def check_every_replacement_has_a_check() -> None:
    public = {
        name
        for name, value in vars(cpu).items()
        if getattr(value, "__module__", "") == cpu.__name__ and not name.startswith("_")
    }
    assert public == {"install_cpu_stand_in", "unusable_gpu", *REPLACEMENTS}


def check_megatron_trains_on_the_cpu_with_it() -> None:
    """Steps by megatron's schedule and optimizer: the purpose of it all."""
    from megatron_chameleon.model.gpt import build_model
    from megatron_chameleon.model.sizes import SIZES, ModelShape
    from megatron_chameleon.parallel.layout import distributed
    from megatron_chameleon.parallel.options import ParallelOptions
    from megatron_chameleon.training.optimizer import (
        build_optimizer,
        build_scheduler,
        data_parallel,
    )
    from megatron_chameleon.training.options import OptimizerOptions
    from megatron_chameleon.training.step import (
        BatchShape,
        Passes,
        train_step,
    )

    shape = ModelShape(SIZES["nano"], vocab_size=50, max_sequence_length=8)
    tokens = torch.randint(0, 50, (2, 9))
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(2, 8),
        "position_ids": torch.arange(8).expand(2, 8),
        "domain": torch.tensor([0, 1]),
    }
    options = OptimizerOptions(lr=1e-2, lr_warmup_iters=1)
    with distributed(ParallelOptions(), seed=0) as layout:
        model = data_parallel([build_model(shape, layout, seed=0)], layout, bf16=False)
        optimizer = build_optimizer(model, options, layout, bf16=False)
        scheduler = build_scheduler(optimizer, options, train_iters=20)
        passes = Passes(model, BatchShape(1, 2, 8), num_domains=2)
        losses = [
            train_step(model, optimizer, scheduler, lambda: passes.forward_backward(iter([batch])))
            .domain_sums[:, 0]
            .sum()
            for _ in range(10)
        ]
    assert losses[-1] < 0.5 * losses[0]


def fails(function: Callable[[], object]) -> bool:
    """Whether torch raises, as it does without CUDA."""
    with pytest.raises((AssertionError, RuntimeError)):
        function()
    return True


def torch_functions() -> list[object]:
    """Everything that the stand-in replaces, as it is now."""
    return [
        *(getattr(torch.cuda, name) for name in ("current_device", "synchronize", "set_device")),
        *(getattr(torch.cuda, name) for name in ("manual_seed", "get_rng_state", "set_rng_state")),
        *(getattr(torch, name) for name in ("tensor", "zeros", "ones", "empty", "empty_like")),
        torch.Tensor.cuda,
        torch.Tensor.type,
    ]


def all_checks() -> dict[str, Callable[[], None]]:
    """Name -> check, in the order in which they have to run."""
    return {name: value for name, value in globals().items() if name.startswith("check_")}


def main(results: Path) -> None:
    """Run every check; write name -> traceback, empty where the check passed."""
    found = {}
    for name, check in all_checks().items():
        found[name] = ""
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
