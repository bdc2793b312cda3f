"""The pooling kernels on a device against float64, at the shapes of the paper's models."""

from __future__ import annotations

import pytest
import torch

from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean, plain_masked_mean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [50, 768, 1200, 1600])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_means_are_those_of_float64(
    dtype: torch.dtype, width: int, normalized: bool, batch_first: bool
) -> None:
    states = (3 + torch.randn(1024, 64, width, device="cuda")).to(dtype)
    lengths = torch.randint(0, 1025, (64,), device="cuda")
    lengths[:2] = torch.tensor([0, 1024])
    valid = torch.arange(1024, device="cuda")[:, None] < lengths
    states[~valid] = torch.nan
    norm = None
    if normalized:
        weight, bias = torch.randn(2, width, device="cuda").to(dtype)
        norm = FinalNorm(weight, bias)
    given = states.transpose(0, 1).contiguous() if batch_first else states
    made = masked_mean(given, lengths=lengths, batch_first=batch_first, norm=norm)
    again = masked_mean(given, lengths=lengths, batch_first=batch_first, norm=norm)
    by_mask = masked_mean(given, mask=valid.t(), batch_first=batch_first, norm=norm)
    right = plain_masked_mean(states.double(), valid, norm)
    assert torch.equal(made, again)
    torch.testing.assert_close(made.double(), right, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(by_mask, made, atol=1e-6, rtol=1e-6)
