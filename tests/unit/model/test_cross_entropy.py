"""Compare the chunked cross entropy with torch's cross entropy. test_memory.py measures its
memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.model import cross_entropy as chunked
from megatron_chameleon.model.cross_entropy import chunked_cross_entropy
from tests.kernel_checks import interpreted
from tests.rounding import assert_as_near


def case(shape=(7, 3), columns=40, vocab_size=37, dtype=torch.float32, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(*shape, columns, generator=generator)).to(dtype)
    labels = torch.randint(vocab_size, shape, generator=generator)
    of_losses = torch.rand(shape, generator=generator) - 0.3
    return logits, labels, of_losses


def ours(logits, labels, of_losses, vocab_size, group=None):
    leaf = logits.clone().requires_grad_()
    losses = chunked_cross_entropy(leaf * 1, labels, vocab_size, group)
    (gradient,) = torch.autograd.grad(losses, leaf, of_losses)
    return losses.detach(), gradient


def expected(logits, labels, of_losses, vocab_size, dtype=torch.float64):
    """Compute torch's cross entropy over the real columns in ``dtype``."""
    leaf = logits.detach().to(dtype).requires_grad_()
    flat = leaf[..., :vocab_size].flatten(0, -2)
    losses = cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)
    (gradient,) = torch.autograd.grad(losses, leaf, of_losses.to(dtype))
    return losses.detach(), gradient


def assert_near_torchs(results, logits, labels, of_losses, vocab_size):
    """Check that errors relative to float64 are similar to those of torch in float32."""
    reference_and_right = [
        expected(logits, labels, of_losses, vocab_size, dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    for mine, reference, right in zip(results, *reference_and_right, strict=True):
        assert_as_near(mine, reference, right)


@pytest.mark.parametrize(("vocab_size", "chunk"), [(1, 41), (37, 1), (37, 200), (40, 1 << 20)])
def test_losses_and_gradients_equal_torchs(vocab_size, chunk, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ON_CPU", chunk)
    inputs = *case(vocab_size=vocab_size), vocab_size
    assert_near_torchs(ours(*inputs), *inputs)


@pytest.mark.parametrize("spread", [1e-3, 3.0, 1e4])
def test_bf16_logits_give_float32_losses_and_bf16_gradients(spread):
    logits, labels, of_losses = case(dtype=torch.bfloat16, spread=spread)
    losses, gradient = ours(logits, labels, of_losses, 37)
    right, right_gradient = expected(logits, labels, of_losses, 37)
    reference, _ = expected(logits, labels, of_losses, 37, torch.float32)
    assert (losses.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    assert_as_near(losses, reference, right)
    # The result is rounded to 8 bits, and the logarithm in each exponent to float32.
    largest = float(logits.abs().max() + 1)
    rounding = 2**-8 + 2 * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(gradient.double(), right_gradient, atol=1e-30, rtol=rounding)


def test_values_of_padding_are_ignored_and_its_gradient_is_zero():
    logits, labels, of_losses = case()
    clean = ours(logits, labels, of_losses, 37)
    for rubbish in (torch.nan, torch.inf, 1e30):
        logits[..., 37:] = rubbish
        losses, gradient = ours(logits, labels, of_losses, 37)
        assert torch.equal(losses, clean[0])
        assert torch.equal(gradient[..., :37], clean[1][..., :37])
        assert (gradient[..., 37:] == 0).all()


def test_a_retained_graph_does_not_overwrite_the_logits():
    logits, labels, of_losses = case()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    losses = chunked_cross_entropy(made, labels, 37)
    (first,) = torch.autograd.grad(losses, leaf, of_losses, retain_graph=True)
    assert torch.equal(made, logits)
    (second,) = torch.autograd.grad(losses, leaf, 2 * of_losses, retain_graph=True)
    torch.testing.assert_close(second, 2 * first)


def test_reading_overwritten_logits_is_an_error(monkeypatch):
    def write(rows, labels, denominator, scale, columns, out):
        out.detach().numpy()[:] = 0.5  # torch does not see this write, like a kernel's write

    monkeypatch.setattr(chunked, "write_gradient", write)
    logits, labels, of_losses = case()
    made = logits.clone().requires_grad_() * 1
    reader = made.square().sum()  # saves the logits
    chunked_cross_entropy(made, labels, 37).backward(of_losses)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reader.backward()


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton")
    interpreted("tests.unit.model.cross_entropy_kernel_checks")
