"""Faults that the simulated device must detect; a request names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def pin_expanded_tensors() -> None:
    """Pin expanded host tensors directly, instead of contiguous copies."""
    contiguous = torch.Tensor.contiguous

    def keep_expanded(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        is_expanded = tensor.device.type == "cpu" and 0 in tensor.stride()
        return tensor if is_expanded else contiguous(tensor, **options)

    torch.Tensor.contiguous = keep_expanded  # type: ignore[method-assign, assignment]


def reduce_host_tensor() -> None:
    """All-reduce a host tensor over NCCL after every forward pass."""
    after_forward_passes(lambda output: dist.all_reduce(torch.zeros(1)))


def read_value() -> None:
    """Read a number from the device after every forward pass."""
    after_forward_passes(lambda output: output.sum().item())


def after_forward_passes(act: Callable[[torch.Tensor], Any]) -> None:
    """Call ``act`` with the output of every forward pass of a whole model."""
    from megatron.core.models.gpt import GPTModel

    def hook(module: torch.nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        if isinstance(module, GPTModel):
            act(output)

    torch.nn.modules.module.register_module_forward_hook(hook)


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (pin_expanded_tensors, reduce_host_tensor, read_value)
}
