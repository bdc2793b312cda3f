from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_chameleon.embedding.pooling import masked_mean


def masked_mean_direct(hidden, lengths):
    """One sequence and one token at a time, in float64."""
    means = np.zeros((hidden.size(1), hidden.size(2)))
    for b, length in enumerate(lengths.tolist()):
        for position in range(length):
            means[b] += hidden[position, b].double().numpy() / length
    return means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 5, 16), (128, 3, 64)])
def test_it_is_the_mean_of_the_tokens_there_are(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(shape, generator=generator) * 4 + 1).to(dtype)
    lengths = torch.randint(1, shape[0] + 1, (shape[1],), generator=generator)
    mean = masked_mean(hidden, lengths)
    assert mean.dtype == torch.float32
    assert mean.shape == shape[1:]
    np.testing.assert_allclose(mean.numpy(), masked_mean_direct(hidden, lengths), atol=5e-6)


@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf, 3e38])
def test_what_padding_holds_never_enters(padding):
    hidden = torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 1, 5, 0])
    expected = masked_mean_direct(hidden, lengths)
    for b, length in enumerate(lengths):
        hidden[length:, b] = padding
    np.testing.assert_allclose(masked_mean(hidden, lengths).numpy(), expected, atol=1e-6)


def test_a_sequence_without_tokens_is_zero():
    hidden = torch.full((4, 2, 3), math.nan)
    assert torch.equal(masked_mean(hidden, torch.tensor([0, 0])), torch.zeros(2, 3))


def test_a_number_that_is_none_among_the_tokens_is_not_hidden():
    hidden = torch.ones(4, 2, 3)
    hidden[1, 0, 2] = math.nan
    mean = masked_mean(hidden, torch.tensor([2, 2]))
    assert torch.isnan(mean).nonzero().tolist() == [[0, 2]]


def test_long_half_precision_sums_do_not_overflow():
    hidden = torch.full((2000, 1, 2), 60_000.0, dtype=torch.float16)
    mean = masked_mean(hidden, torch.tensor([2000]))
    torch.testing.assert_close(mean, torch.full((1, 2), hidden[0, 0, 0].item()))
