"""Pooling kernels on a GPU equal a float64 reference, at the shapes of the paper's models."""

from __future__ import annotations

import pytest
import torch

from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean, plain_masked_mean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [50, 768, 1200, 1600])
@pytest.mark.parametrize("parameters", [0, 1, 2], ids=["no norm", "RMSNorm", "LayerNorm"])
def test_means_are_those_of_float64(dtype: torch.dtype, width: int, parameters: int) -> None:
    states = (3 + torch.randn(1024, 64, width, device="cuda")).to(dtype)
    lengths = torch.randint(0, 1025, (64,), device="cuda")
    lengths[:2] = torch.tensor([0, 1024])
    valid = torch.arange(1024, device="cuda")[:, None] < lengths
    states[~valid] = torch.nan
    values = torch.randn(parameters, width, device="cuda").to(dtype)
    norm = FinalNorm(*values) if parameters else None
    made = masked_mean(states, lengths, norm)
    expected = plain_masked_mean(states.double(), valid, norm)
    assert torch.equal(made, masked_mean(states, lengths, norm))
    torch.testing.assert_close(made.double(), expected, atol=5e-6, rtol=1e-6)
