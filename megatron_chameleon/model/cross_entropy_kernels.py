"""Triton kernels of the cross entropy: each logit is read once forward and once backward.

model/cross_entropy.py has the equations and the reference in plain torch. A program processes one
row of the logits in blocks. Loads are masked by the padded width, a multiple of 16, and padding is
discarded after the loads: masking by the vocabulary size, such as 50,257, would prevent 16-byte
loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def log_sum_exp_kernel(  # type: ignore[no-untyped-def]
    rows, result, stride, width, columns, BLOCK: tl.constexpr
):
    """Compute result[row] = log(sum(exp(rows[row, :columns]))), rescaled at each larger logit.

    The running maximum and sum follow Milakov and Gimelshein 2018, "Online normalizer calculation
    for softmax".
    """
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 2**31
    offsets = tl.arange(0, BLOCK)
    largest = LOWEST  # finite, since -inf minus -inf is NaN
    total = 0.0
    for first in range(0, columns, BLOCK):
        column = first + offsets
        x = tl.load(rows + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        x = tl.where(column < columns, x, -float("inf"))
        now_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - now_largest) + tl.sum(tl.exp(x - now_largest), 0)
        largest = now_largest
    tl.store(result + row, largest + tl.log(total))


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    rows, labels, denominators, scales, out, stride, width, columns, BLOCK: tl.constexpr
):
    """Write out[row, i] = scale * (exp(rows[row, i] - denominator) - (i == label)).

    The gradient of padding, from column ``columns`` on, is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    denominator = tl.load(denominators + row)
    scale = tl.load(scales + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(rows + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        gradient = tl.exp(x - denominator) - tl.where(column == label, 1.0, 0.0)
        gradient = tl.where(column < columns, gradient * scale, 0.0)
        tl.store(out + row * stride + column, gradient, mask=column < width)


def launch_log_sum_exp(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [n] float32 from contiguous ``rows`` [n, v]; see ``cross_entropy.log_sum_exp``."""
    assert rows.is_contiguous()
    result = rows.new_empty(rows.size(0), dtype=torch.float32)
    log_sum_exp_kernel[(rows.size(0),)](
        rows, result, rows.stride(0), rows.size(1), columns, BLOCK=BLOCK, num_warps=WARPS
    )
    return result


def launch_write_gradient(
    rows: torch.Tensor,
    labels: torch.Tensor,
    denominator: torch.Tensor,
    scale: torch.Tensor,
    columns: int,
    out: torch.Tensor,
) -> None:
    """Write the gradient to ``out``, possibly ``rows``; see ``cross_entropy.write_gradient``."""
    assert rows.is_contiguous()
    assert out.is_contiguous()
    by_row = (labels.contiguous(), denominator.contiguous(), scale.contiguous())
    gradient_kernel[(rows.size(0),)](
        rows, *by_row, out, rows.stride(0), rows.size(1), columns, BLOCK=BLOCK, num_warps=WARPS
    )
