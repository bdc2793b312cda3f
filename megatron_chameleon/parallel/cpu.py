"""Run megatron-core over gloo on a machine without CUDA.

megatron-core calls torch.cuda for its device, its random state and its tensors by name. Without a
CUDA device, :func:`install_cpu_stand_in` replaces these calls by their CPU counterparts in this
process. With a CUDA device it does nothing, so that both cases use the same code path.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

_GPU_FILES = "/dev/nvidia[0-9]*"
_CPU = torch.device("cpu")
_INSTALLED = "_megatron_chameleon_cpu_stand_in"
# Parameters and values for glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_LARGEST_INT = 2**31 - 1


def install_cpu_stand_in() -> bool:
    """Install the replacements once. Return whether this process runs on the CPU."""
    if torch.cuda.is_available():
        return False
    if hasattr(torch.cuda, _INSTALLED):
        return True
    from megatron.core.tensor_parallel import layers as megatron_layers
    from megatron.core.tensor_parallel import random as megatron_random

    # The CPU is the current device. Each name gets its own function, since the compiler rejects a
    # function that appears under two of torch's names.
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_arguments, **_more: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_stream = lambda *_device: torch.cpu.current_stream()  # type: ignore[assignment]

    # The CPU has a single generator, which replaces the CUDA generators, also in megatron's
    # tracker. The tracker would warn that the CPU generator advances, which is intended here.
    def get_state(device: Any = None) -> torch.Tensor:  # torch passes device= by name
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_where: Any, **_more: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state  # type: ignore[assignment]
    megatron_random._set_cuda_rng_state = set_state
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # Constructors with device="cuda" and Tensor.cuda() return CPU tensors. The context manager
    # torch.device, with which transformers loads models, collects the constructors on first use,
    # so it is used before they are replaced.
    with _CPU:
        torch.empty(0)
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_arguments, **_more: self  # type: ignore[method-assign]

    # megatron's optimizer groups parameters by the names of CUDA tensor types.
    plain_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        if arguments or more:
            return plain_type(self, *arguments, **more)
        return str(plain_type(self)).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign, assignment]
    # Apex's kernel adds a weight's gradient to its buffer within the matrix product.
    megatron_layers.fused_weight_gradient_mlp_cuda = _WeightGradient
    megatron_layers._grad_accum_fusion_available = True
    # The compiler, which megatron uses for fused functions, fails on the replaced calls.
    torch.compiler.set_stance("force_eager")
    _keep_freed_memory()
    setattr(torch.cuda, _INSTALLED, True)
    return True


def _on_cpu(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(constructor)
    def construct(*arguments: Any, **more: Any) -> torch.Tensor:
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = _CPU
        return constructor(*arguments, **more)

    return construct


class _WeightGradient:
    """Replace Apex's fused_weight_gradient_mlp_cuda."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Add gradients [tokens, out] times inputs [tokens, in] to ``total`` [out, in] float32."""
        if inputs.dtype == total.dtype:
            total.addmm_(gradients.t(), inputs)
        else:
            total.add_(gradients.t() @ inputs)


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse instead of returning it to the system.

    Every step allocates the same large tensors again. Memory that was returned must be mapped again
    in each step, which costs a small model a third of its speed.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries than glibc have no such setting
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def unusable_gpu() -> str | None:
    """Return why torch cannot use this machine's GPU, and the fix.

    Returns:
        None if it can, if there is no GPU, if this torch is built for the CPU, or if
        CUDA_VISIBLE_DEVICES hides all devices, which selects the CPU.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if torch.version.cuda is None or is_hidden or not glob.glob(_GPU_FILES):
        return None
    if torch.cuda.is_available():
        return None
    return (
        f"torch for CUDA {torch.version.cuda} cannot use this machine's GPU: update its driver "
        "(nvidia-smi prints the CUDA version it supports) or install a torch for that version; "
        "CUDA_VISIBLE_DEVICES= runs on the CPU"
    )
