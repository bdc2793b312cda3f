"""Proving Triton kernels where there is no GPU: in the interpreter, and compiled to PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = (80, 90, 100)
"""Of the A100, the H100 and H200, and the B200."""


def interpreted(module: str) -> dict[str, float]:
    """The largest errors that ``module`` prints as JSON, run with kernels in the interpreter.

    In a process of its own: Triton reads the variable when a kernel is defined.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    errors: dict[str, float] = json.loads(done.stdout)
    return errors


def ptx(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    warps: int,
    aligned: Sequence[str] = (),
) -> str:
    """What ``kernel`` compiles to, for arguments of ``types`` and constexpr ``constants``.

    A launch finds out which arguments are ``aligned``, divisible by 16; here it has to be said.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    divisible = [["tt.divisibility", 16]]
    attributes = {(kernel.arg_names.index(name),): divisible for name in aligned}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    text: str = compiled.asm["ptx"]
    assert f".target sm_{capability}" in text
    return text
