"""Compare the Triton kernels, run in Triton's interpreter, with plain torch."""

from __future__ import annotations

import torch

from megatron_chameleon.model import cross_entropy, cross_entropy_kernels
from tests.rounding import assert_as_near


def check(columns: int, width: int, dtype: torch.dtype, spread: float) -> None:
    """Compare the kernels' denominator and in-place gradient with plain torch."""
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
    # Tolerances: exponentials differ in their last bits, and the interpreter truncates bf16.
    rounding = 8 * torch.finfo(torch.float32).eps
    relative_rounding = 2**-7 if dtype == torch.bfloat16 else rounding
    torch.testing.assert_close(out, right, atol=rounding, rtol=relative_rounding)


if __name__ == "__main__":
    block = cross_entropy_kernels.BLOCK
    for columns, width in ((1, 128), (100, 128), (block, block), (2 * block + 5, 3 * block)):
        for dtype in (torch.float32, torch.bfloat16):
            for spread in (1e-3, 3.0, 1e3):
                check(columns, width, dtype, spread)
    nothing = cross_entropy_kernels.launch_log_sum_exp(torch.randn(3, 64), 0)
    assert (nothing == -torch.inf).all()
