"""The pooling kernels in the interpreter against float64; prints the largest errors as JSON."""

from __future__ import annotations

import itertools
import json

import torch

from megatron_chameleon.embedding.pooling import FinalNorm, plain_masked_mean
from megatron_chameleon.embedding.pooling_kernels import CHUNK, launch_masked_mean
from tests.rounding import assert_as_near

SHAPES = ((1, 1), (CHUNK - 1, 50), (2 * CHUNK + 5, 50), (9, 768), (5, 1200), (3, 1600))
CASES = [(shape, torch.bfloat16) for shape in SHAPES]
CASES += itertools.product(SHAPES[1:3], (torch.float16, torch.float32))


class Case:
    """Hidden states [s, b, h] with non-finite padding, and their valid positions."""

    def __init__(self, length: int, width: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(length * width)
        self.dtype = dtype
        states = 3.0 + torch.randn(length, 4, width, generator=self.generator)
        self.counts = torch.tensor([0, 1, length // 2, length])
        self.first = torch.arange(length)[:, None] < self.counts
        self.scattered = torch.rand(length, 4, generator=self.generator) < 0.3
        self.scattered[:, 0] = False
        self.states = states.to(dtype)
        self.norm = FinalNorm(self.random(width), self.random(width))

    def random(self, *shape: int) -> torch.Tensor:
        """Random numbers of the case's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def error(self, *, masked: bool, normalized: bool, batch_first: bool) -> float:
        """The largest error, of values around 3."""
        valid = self.scattered if masked else self.first
        counts = valid.sum(0)
        states = self.states.clone()
        padding = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=self.dtype)
        states[~valid] = padding[torch.arange(int((~valid).sum())) % 3, None]
        if batch_first:
            states = states.transpose(0, 1).contiguous().transpose(0, 1)
        norm = self.norm if normalized else None
        mask = valid.t().contiguous() if masked else None
        made, again = (launch_masked_mean(states, counts, mask, norm) for _ in range(2))
        assert torch.equal(made, again)
        assert made.dtype == torch.float32
        assert (made[counts == 0] == 0).all()
        expected = plain_masked_mean(states.double(), valid, norm)
        assert_as_near(made, plain_masked_mean(states.float(), valid, norm), expected)
        return float((made.double() - expected).abs().max())


def main() -> None:
    """Every combination of length, width, type, mask, norm and order of dimensions."""
    checked = {}
    for (length, width), dtype in CASES:
        case = Case(length, width, dtype)
        for masked, normalized in ((False, False), (True, False), (False, True), (True, True)):
            error = case.error(masked=masked, normalized=normalized, batch_first=masked)
            checked[f"{length} x {width} {dtype}, mask {masked}, norm {normalized}"] = error
    print(json.dumps(checked))


if __name__ == "__main__":
    main()
