"""The Triton kernels in the interpreter against plain torch; prints the largest errors as JSON."""

from __future__ import annotations

import json

import torch

from megatron_chameleon.model import cross_entropy, cross_entropy_kernels
from tests.rounding import assert_as_near


def errors(columns: int, width: int, dtype: torch.dtype, spread: float) -> tuple[float, float]:
    """Of the denominator and of the gradient, which is written in place."""
    generator = torch.Generator().manual_seed(columns)
    rows = (spread * torch.randn(5, width, generator=generator)).to(dtype)
    rows[:, columns:] = torch.nan
    labels = torch.tensor([0, columns - 1, columns // 2, -3, columns + width])
    scale = torch.tensor([0.5, -1.0, 2.0, 1.0, 0.0])
    denominator = cross_entropy.log_sum_exp(rows, columns)
    made = cross_entropy_kernels.launch_log_sum_exp(rows, columns)
    right, out = torch.full_like(rows, torch.nan), rows.clone()
    cross_entropy.write_gradient(rows, labels, denominator, scale, columns, right)
    cross_entropy_kernels.launch_write_gradient(out, labels, denominator, scale, columns, out)
    assert_as_near(made, denominator, rows[:, :columns].double().logsumexp(1))
    # Both take the same exponentials, each with its own last bits; the interpreter truncates bf16.
    rounding = 8 * torch.finfo(torch.float32).eps
    relative_rounding = 2**-7 if dtype == torch.bfloat16 else rounding
    torch.testing.assert_close(out, right, atol=rounding, rtol=relative_rounding)
    relative = (made - denominator).abs() / denominator.abs().clamp(min=1)
    return float(relative.max()), float((out - right).abs().max()) if dtype.itemsize == 4 else 0.0


def main() -> None:
    """Every combination of width, padding, type and spread."""
    block = cross_entropy_kernels.BLOCK
    checked = {}
    for columns, width in ((1, 128), (100, 128), (block, block), (2 * block + 5, 3 * block)):
        for dtype in (torch.float32, torch.bfloat16):
            for spread in (1e-3, 3.0, 1e3):
                checked[f"{columns} of {width} {dtype} {spread}"] = max(
                    errors(columns, width, dtype, spread)
                )
    nothing = cross_entropy_kernels.launch_log_sum_exp(torch.randn(3, 64), 0)
    assert (nothing == -torch.inf).all()
    print(json.dumps(checked))


if __name__ == "__main__":
    main()
