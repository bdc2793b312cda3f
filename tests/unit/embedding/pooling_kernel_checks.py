"""Compare the pooling kernels, run by Triton's interpreter, with means in float64."""

from __future__ import annotations

import itertools
from typing import get_args

import torch

from megatron_chameleon.embedding.pooling import FinalNorm, plain_masked_mean
from megatron_chameleon.embedding.pooling_kernels import CHUNK, launch_masked_mean
from megatron_chameleon.model.config import Normalization
from tests.rounding import assert_as_near

SHAPES = ((1, 1), (CHUNK - 1, 50), (2 * CHUNK + 5, 50), (5, 1200))
CASES = [(shape, torch.bfloat16) for shape in SHAPES]
NORMS = get_args(Normalization)
CASES += itertools.product(SHAPES[1:3], (torch.float16, torch.float32))


def check(
    size: int, width: int, dtype: torch.dtype, *, norm: str | None, transposed: bool = False
) -> None:
    """Check the means of random hidden states [s, b, h] with non-finite padding.

    ``transposed``: dimension b comes first in memory.
    """
    generator = torch.Generator().manual_seed(size * width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    states = (3.0 + random(size, 4, width)).to(dtype)
    if transposed:
        states = states.transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.tensor([0, 1, size // 2, size])
    valid = torch.arange(size)[:, None] < lengths
    padding = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    states[~valid] = padding[torch.arange(int((~valid).sum())) % 3, None]
    weight, bias = random(2, width).to(dtype)
    final_norm = FinalNorm(weight, bias if norm == "LayerNorm" else None) if norm else None
    made = launch_masked_mean(states, lengths, final_norm)
    assert made.dtype == torch.float32
    assert (made[lengths == 0] == 0).all()
    expected = plain_masked_mean(states.double(), valid, final_norm)
    assert_as_near(made, plain_masked_mean(states.float(), valid, final_norm), expected)


if __name__ == "__main__":
    for ((size, width), dtype), norm in itertools.product(CASES, (None, *NORMS)):
        check(size, width, dtype, norm=norm)
    check(*SHAPES[2], torch.float32, norm="LayerNorm", transposed=True)
