"""Check whether Triton can launch kernels in this process.

A successful import is not enough: Triton compiles its launcher at the first launch, with the
machine's C compiler and Python's headers, and slim images have neither.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels can run on ``tensor``; warn once if they cannot on its GPU."""
    return tensor.is_cuda and _works_or_warns()


@functools.cache
def triton_problem() -> str | None:
    """Check, once per process, that an empty kernel runs on the current CUDA device.

    Returns:
        None if the kernel ran, otherwise one line with the cause and the fix.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    try:
        import triton

        triton.jit(_empty_kernel)[(1,)](torch.empty(1, device="cuda"))
    # Compiler, linker, driver and Triton raise many types of errors; after any of them, torch's
    # operations are used instead.
    except Exception as error:
        return _missing_tools() or f"Triton cannot launch a kernel: {error}".splitlines()[0]
    return None


def _empty_kernel(_tensor):  # type: ignore[no-untyped-def]
    return


def _missing_tools() -> str | None:
    """Look for the tools that build Triton's launcher, as Triton does; report missing tools."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    missing = []
    if compiler is None or shutil.which(compiler) is None:
        missing.append("a C compiler")
    if not header.is_file():
        missing.append(f"Python's headers ({header})")
    if not missing:
        return None
    return f"Triton needs {' and '.join(missing)}: apt-get install gcc python3-dev"


@functools.cache
def _works_or_warns() -> bool:
    problem = triton_problem()
    if problem is not None:
        warnings.warn(f"{problem}; using torch's slower operations", stacklevel=4)
    return problem is None
