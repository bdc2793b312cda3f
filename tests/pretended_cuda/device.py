"""A CUDA device that is pretended: real numbers in the CPU's memory, by CUDA's rules.

After :func:`install`, ``torch.cuda.is_available()`` is True in this process and the project takes
every CUDA branch, with NCCL pretended over gloo. What CUDA refuses fails here too: tensors of two
devices in an operation, tensors of the host in NCCL's collectives, ``.numpy()`` of device tensors,
another rank's device, pinned memory whose elements overlap. Waits of the host are counted in
``DEVICE.synchronizations``. CONTRIBUTING.md says what this cannot show.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from tests.pretended_cuda.cuda_api import patch_torch_cuda
from tests.pretended_cuda.process_groups import patch_process_groups
from tests.pretended_cuda.synchronizations import FORWARD_PASS, TRAINING_STEP
from tests.pretended_cuda.tensors import DEVICE, DeviceTensor, DispatchMode
from tests.pretended_cuda.torch_internals import register_cuda


def install() -> None:
    """Pretend a CUDA device in this process, for good: before anything imports megatron.core."""
    register_cuda(lambda: DEVICE.current)
    patch_torch_cuda()
    _move_parameters_as_new_ones()
    _recognize_saving()
    patch_process_groups()
    # torch.tensor(..., device="cuda") would copy below Python's dispatch otherwise.
    torch._C._set_only_lift_cpu_tensors(True)
    DispatchMode().__enter__()
    # megatron notes that the generator of the CPU, which computes here, has advanced.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def mark_steps_and_passes() -> None:
    """Mark training steps and forward passes in ``DEVICE.synchronizations``, for good."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_layer import TransformerLayer

    first_layers: list[torch.nn.Module] = []
    step = OptimizerParamScheduler.step

    def mark_step(scheduler: Any, increment: int) -> None:
        step(scheduler, increment)
        DEVICE.synchronizations.mark(TRAINING_STEP)

    def mark_pass(module: torch.nn.Module, _arguments: Any) -> None:
        if not first_layers and isinstance(module, TransformerLayer):
            first_layers.append(module)
        if module in first_layers:
            DEVICE.synchronizations.mark(FORWARD_PASS)

    OptimizerParamScheduler.step = mark_step
    torch.nn.modules.module.register_module_forward_pre_hook(mark_pass)


def interpret_kernels() -> None:
    """Run Triton's kernels by its interpreter; TRITON_INTERPRET=1 is set before it is imported."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def checked(executor: Any, *arguments: Any, **keywords: Any) -> None:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        with DEVICE.synchronizations.paused():
            run(executor, *arguments, **keywords)

    GridExecutor.__call__ = checked


def hide_triton() -> None:
    """Let Triton be missing: without the interpreter it would look for a driver."""
    sys.modules["triton"] = None  # type: ignore[assignment]


def _move_parameters_as_new_ones() -> None:
    """Let Module.to() make new parameters, as setting ``.data`` would not change their device."""
    apply = torch.nn.Module._apply

    def apply_to_new(self: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
        for name, old in self._parameters.items():
            if old is None or isinstance(old, DeviceTensor):
                continue
            with torch.no_grad():
                moved = function(old)
            if isinstance(moved, DeviceTensor):
                new: Any = moved.detach().requires_grad_(old.requires_grad)
                # Also what megatron has noted on the old one, such as how it is sharded.
                vars(new).update(
                    {**vars(old), "device_index": moved.device_index, "_is_param": True}
                )
                self._parameters[name] = new
        return apply(self, function, recurse)

    torch.nn.Module._apply = apply_to_new  # type: ignore[method-assign]


def _recognize_saving() -> None:
    save = torch.save

    def recognized(*arguments: Any, **options: Any) -> None:
        DEVICE.is_saving = True
        try:
            save(*arguments, **options)
        finally:
            DEVICE.is_saving = False

    torch.save = recognized
