"""Whether Triton can launch kernels in this process.

Importing Triton proves nothing: it compiles its launcher with the machine's C compiler and Python's
headers when the first kernel is launched, and slim images have neither.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can run on ``tensor``; warns once if they could not on its GPU."""
    return tensor.is_cuda and _works_or_warns()


@functools.cache
def triton_problem() -> str | None:
    """Launch an empty kernel on the current CUDA device, once per process.

    Returns:
        None if it ran, else a line that gives the cause and the fix.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    try:
        triton: Any = importlib.import_module("triton")
        triton.jit(_empty_kernel)[(1,)](torch.empty(1, device="cuda"))
    except Exception as error:  # of the compiler, the linker, the driver or Triton: none is fatal
        return _missing_tools() or f"Triton launches no kernel: {error}".splitlines()[0]
    return None


def _empty_kernel(_tensor):  # type: ignore[no-untyped-def]
    return


def _missing_tools() -> str | None:
    """What Triton's build of its launcher lacks, by the places where it looks for it."""
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
        warnings.warn(f"{problem}; torch's slower operations are used instead", stacklevel=4)
    return problem is None
