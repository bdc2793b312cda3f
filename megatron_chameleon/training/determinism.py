"""Runs that repeat bit for bit on GPUs, as they do on the CPU anyway."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

# Of the two values that make cuBLAS deterministic, the one with the larger workspace.
CUBLAS_WORKSPACE = ":4096:8"
# Sums over GPUs in an order that is the same every time; left to itself, NCCL may choose between
# algorithms anew, or add in the switch.
NCCL_ALGORITHM = "Ring"


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let torch use only deterministic algorithms within the block, if ``enabled``.

    scaled_dot_product_attention then leaves out its backends that are not, and what has no
    deterministic form raises RuntimeError. It has to be entered before CUDA is used: cuBLAS and
    NCCL read their settings once, and what the user has set there stays. See
    torch.use_deterministic_algorithms.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    os.environ.setdefault("NCCL_ALGO", NCCL_ALGORITHM)
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before writing it, so filling every new tensor would be for nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
