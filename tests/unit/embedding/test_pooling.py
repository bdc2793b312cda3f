"""Masked means of hidden states: plain torch, and the kernels in Triton's interpreter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean
from tests.kernel_checks import interpreted

LENGTHS = torch.tensor([9, 1, 5, 0])


def mean_direct(hidden, lengths):
    """Plain reference: one sequence and one token at a time, in float64."""
    means = np.zeros((hidden.size(1), hidden.size(2)))
    for b, length in enumerate(lengths.tolist()):
        for position in range(length):
            means[b] += hidden[position, b].double().numpy() / length
    return means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "offset"), [((128, 3, 64), 1), ((2000, 1, 2), 6e4)])
def test_masked_mean_matches_a_sum_in_float64(dtype, shape, offset):
    """Sums are in float32: float16 would overflow at values around 60,000."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(shape, generator=generator) * 4 + offset).to(dtype)
    lengths = torch.randint(1, shape[0] + 1, (shape[1],), generator=generator)
    mean = masked_mean(hidden, lengths)
    assert mean.dtype == torch.float32
    np.testing.assert_allclose(mean.numpy(), mean_direct(hidden, lengths), atol=5e-6, rtol=1e-6)


@pytest.fixture
def states():
    return torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(2))


def test_padding_is_ignored_but_not_non_finite_tokens(states):
    expected = mean_direct(states, LENGTHS)
    for padding in (math.nan, math.inf, -math.inf, 3e38):
        for b, length in enumerate(LENGTHS):
            states[length:, b] = padding
        mean = masked_mean(states, LENGTHS)
        np.testing.assert_allclose(mean.numpy(), expected, atol=1e-6)
    states[1, 0, 2] = math.nan
    assert masked_mean(states, LENGTHS).isnan().nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(("kind", "parameters"), [(torch.nn.LayerNorm, 2), (torch.nn.RMSNorm, 1)])
def test_norm_precedes_the_mean(states, kind, parameters):
    norm = kind(6, eps=1e-3)
    values = torch.rand(parameters, 6)
    for parameter, value in zip(norm.parameters(), values, strict=True):
        parameter.data.copy_(value)
    mean = masked_mean(states, LENGTHS, FinalNorm(*values, epsilon=1e-3))
    torch.testing.assert_close(mean, masked_mean(norm(states).detach(), LENGTHS))
    assert not mean[3].any()


def test_kernels_match_float64_in_the_interpreter():
    pytest.importorskip("triton")
    interpreted("tests.unit.embedding.pooling_kernel_checks")
