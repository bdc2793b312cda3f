"""Test that Triton kernels compiled for sm_80, sm_90 and sm_100 do not spill and use wide loads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.kernel_checks import CAPABILITIES, compile_kernel

pytest.importorskip("triton")

from triton.runtime import JITFunction

from megatron_chameleon.embedding import pooling_kernels
from megatron_chameleon.model import cross_entropy_kernels

SHARED_BYTES = 4096
WIDE_LOAD, WIDE_STORE = "ld.global.v4.b32", "st.global.v4.b32"  # instructions that move 16 bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with its arguments and options at a launch, and the expected resources.

    Attributes:
        kernel: the Triton function.
        types: argument -> Triton type; arguments that the kernel does not have are ignored.
        constants: constexpr arguments.
        warps: warps per block.
        aligned: arguments that are divisible by 16 at a launch.
        registers: maximum number of registers per thread; all threads of an SM share 65,536
            registers.
        wide: 16-byte load and store instructions that the PTX must contain.
    """

    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    aligned: tuple[str, ...]
    registers: int
    wide: tuple[str, ...]


def cross_entropy_case(kernel: JITFunction, dtype: str) -> Case:
    """Return a case for a vocabulary of 50,257 tokens, padded to a multiple of 128 columns."""
    types = {"result": "*fp32", "labels": "*i64", "denominators": "*fp32", "scales": "*fp32"}
    types |= dict.fromkeys(("stride", "width", "columns"), "i32") | {"rows": dtype, "out": dtype}
    return Case(
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {"BLOCK": cross_entropy_kernels.BLOCK},
        cross_entropy_kernels.WARPS,
        tuple({"rows", "out", "stride", "width"} & set(kernel.arg_names)),
        registers=64,
        wide=(WIDE_LOAD, WIDE_STORE) if "out" in kernel.arg_names else (WIDE_LOAD,),
    )


POOLING_TYPES = (
    {"lengths": "*i64", "sums": "*fp32", "means": "*fp32", "epsilon": "fp32"}
    | dict.fromkeys(("width", "position_stride", "batch_stride"), "i32")
    | {"hidden": "*bf16", "weight": "*bf16", "bias": "*bf16"}
)


def pooling_case(kernel: JITFunction, registers: int, *, norm: bool, **more: Any) -> Case:
    """Return a case for a pooling kernel.

    ``more`` is the width and dtype of the hidden states, for the summing kernel only.
    """
    constants: dict[str, Any] = {"NORMALIZE": norm, "CHUNK": pooling_kernels.CHUNK}
    is_sum = kernel is pooling_kernels.chunk_sums_kernel
    if is_sum:
        rows, columns = pooling_kernels.tile(more["width"], norm)
        constants |= {"CENTER": norm, "ROWS": rows, "COLUMNS": columns}
        aligned: tuple[str, ...] = ("hidden", "width", "position_stride", "batch_stride")
    else:
        constants |= {"COLUMNS": pooling_kernels.ADDING_TILE}
        aligned = ("sums", "width")
    types = POOLING_TYPES | {"hidden": more.get("dtype", "*bf16")}
    wide = (WIDE_LOAD,) if is_sum else ()
    return Case(kernel, types, constants, pooling_kernels.WARPS, aligned, registers, wide)


SUMS, ADDING = pooling_kernels.chunk_sums_kernel, pooling_kernels.add_chunks_kernel
CASES = {
    f"{kernel.__name__} {dtype}": cross_entropy_case(kernel, dtype)
    for kernel in (cross_entropy_kernels.log_sum_exp_kernel, cross_entropy_kernels.gradient_kernel)
    for dtype in ("*bf16", "*fp32")
} | {
    "sums of bf16": pooling_case(SUMS, 64, norm=False, width=768),
    "sums of fp32": pooling_case(SUMS, 96, norm=True, width=1200, dtype="*fp32"),
    "sums of the widest": pooling_case(SUMS, 170, norm=True, width=8192),
    "adding, normalized": pooling_case(ADDING, 64, norm=True),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_stay_within_their_resources(case: Case, capability: int) -> None:
    made = compile_kernel(
        case.kernel, case.types, case.constants, capability, case.warps, case.aligned
    )
    assert made.stack_bytes == 0
    assert 0 < made.registers <= case.registers
    assert made.shared_bytes <= SHARED_BYTES
    for instruction in case.wide:
        assert instruction in made.ptx
