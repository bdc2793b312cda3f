from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean
from tests.kernel_checks import interpreted


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
    mean = masked_mean(hidden, lengths=lengths)
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
    np.testing.assert_allclose(masked_mean(hidden, lengths=lengths).numpy(), expected, atol=1e-6)


def test_a_number_that_is_none_among_the_tokens_is_not_hidden():
    hidden = torch.ones(4, 2, 3)
    hidden[1, 0, 2] = math.nan
    mean = masked_mean(hidden, lengths=torch.tensor([2, 2]))
    assert torch.isnan(mean).nonzero().tolist() == [[0, 2]]


def test_long_half_precision_sums_do_not_overflow():
    hidden = torch.full((2000, 1, 2), 60_000.0, dtype=torch.float16)
    mean = masked_mean(hidden, lengths=torch.tensor([2000]))
    torch.testing.assert_close(mean, torch.full((1, 2), hidden[0, 0, 0].item()))


@pytest.fixture
def states():
    return torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(2))


def test_the_order_of_dimensions_does_not_matter(states):
    lengths = torch.tensor([9, 1, 5, 0])
    batch_first = states.transpose(0, 1).contiguous()
    assert torch.equal(
        masked_mean(batch_first, lengths=lengths, batch_first=True),
        masked_mean(states, lengths=lengths),
    )


def test_a_mask_of_the_first_positions_is_their_number(states):
    lengths = torch.tensor([9, 1, 5, 0])
    mask = torch.arange(9) < lengths[:, None]
    expected = masked_mean(states, lengths=lengths)
    torch.testing.assert_close(masked_mean(states, mask=mask), expected)
    torch.testing.assert_close(masked_mean(states, mask=mask.long()), expected)


def test_a_mask_may_have_holes(states):
    mask = torch.zeros(4, 9, dtype=torch.bool)
    mask[1, [0, 3, 8]] = True
    states[1:3, 1] = math.nan
    mean = masked_mean(states, mask=mask)
    torch.testing.assert_close(mean[1], states[[0, 3, 8], 1].mean(0))
    assert not mean[[0, 2, 3]].any()


def test_the_final_norm_is_applied_to_every_state(states):
    weight, bias = torch.rand(6), torch.rand(6)
    lengths = torch.tensor([9, 1, 5, 0])
    mean = masked_mean(states, lengths=lengths, norm=FinalNorm(weight, bias, 1e-3))
    normed = torch.nn.functional.layer_norm(states, (6,), weight, bias, 1e-3)
    torch.testing.assert_close(mean, masked_mean(normed, lengths=lengths))
    assert not mean[3].any()


def test_lengths_or_a_mask_of_the_right_shape_are_needed(states):
    mask = torch.ones(4, 9)
    with pytest.raises(ValueError, match="either lengths or a mask"):
        masked_mean(states)
    with pytest.raises(ValueError, match="either lengths or a mask"):
        masked_mean(states, lengths=torch.ones(4), mask=mask)
    with pytest.raises(ValueError, match=r"these states they are \[4\]"):
        masked_mean(states, lengths=torch.ones(9))
    with pytest.raises(ValueError, match=r"it has to be \[4, 9\]"):
        masked_mean(states, mask=mask.t())


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton")
    checked = interpreted("tests.unit.embedding.pooling_kernel_checks")
    assert len(checked) == 72
