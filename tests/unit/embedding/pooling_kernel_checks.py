"""Compare the pooling kernels in the interpreter with float64."""

from __future__ import annotations

import itertools

import torch

from megatron_chameleon.embedding.pooling import FinalNorm, plain_masked_mean
from megatron_chameleon.embedding.pooling_kernels import CHUNK, launch_masked_mean
from tests.rounding import assert_as_near

SHAPES = ((1, 1), (CHUNK - 1, 50), (2 * CHUNK + 5, 50), (5, 1200))
CASES = [(shape, torch.bfloat16) for shape in SHAPES]
CASES += itertools.product(SHAPES[1:3], (torch.float16, torch.float32))


def check(length: int, width: int, dtype: torch.dtype, *, masked: bool, normalized: bool) -> None:
    """Check the means of random hidden states [s, b, h] with non-finite padding.

    With a mask, dimension b comes first in memory.
    """
    generator = torch.Generator().manual_seed(length * width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    states = (3.0 + random(length, 4, width)).to(dtype)
    valid = torch.arange(length)[:, None] < torch.tensor([0, 1, length // 2, length])
    if masked:
        valid = torch.rand(length, 4, generator=generator) < 0.3
        valid[:, 0] = False
        states = states.transpose(0, 1).contiguous().transpose(0, 1)
    padding = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    states[~valid] = padding[torch.arange(int((~valid).sum())) % 3, None]
    norm = FinalNorm(random(width).to(dtype), random(width).to(dtype)) if normalized else None
    mask, counts = valid.t().contiguous() if masked else None, valid.sum(0)
    made = launch_masked_mean(states, counts, mask, norm)
    assert made.dtype == torch.float32
    assert (made[counts == 0] == 0).all()
    expected = plain_masked_mean(states.double(), valid, norm)
    assert_as_near(made, plain_masked_mean(states.float(), valid, norm), expected)


if __name__ == "__main__":
    for ((length, width), dtype), masked, normalized in itertools.product(
        CASES, (False, True), (False, True)
    ):
        check(length, width, dtype, masked=masked, normalized=normalized)
