"""The chunked cross entropy against torch's, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

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
    """torch's cross entropy over the real columns, computed in ``dtype``."""
    leaf = logits.detach().to(dtype).requires_grad_()
    flat = leaf[..., :vocab_size].flatten(0, -2)
    losses = cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)
    (gradient,) = torch.autograd.grad(losses, leaf, of_losses.to(dtype))
    return losses.detach(), gradient


def assert_near_torchs(results, logits, labels, of_losses, vocab_size):
    """Compare with torch's in float64; the error of torch's in float32 is allowed."""
    reference_and_right = [
        expected(logits, labels, of_losses, vocab_size, dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    for mine, reference, right in zip(results, *reference_and_right, strict=True):
        assert_as_near(mine, reference, right)


@pytest.mark.parametrize(("vocab_size", "chunk"), [(1, 41), (37, 1), (37, 200), (40, 1 << 20)])
def test_losses_and_gradients_are_torchs(vocab_size, chunk, monkeypatch):
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
    # One rounding to 8 bits, after float32's of the logarithm that each exponent is taken from.
    largest = float(logits.abs().max() + 1)
    rounding = 2**-8 + 2 * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(gradient.double(), right_gradient, atol=1e-30, rtol=rounding)


def test_padding_may_hold_anything_and_gets_no_gradient():
    logits, labels, of_losses = case()
    clean = ours(logits, labels, of_losses, 37)
    for rubbish in (torch.nan, torch.inf, 1e30):
        logits[..., 37:] = rubbish
        losses, gradient = ours(logits, labels, of_losses, 37)
        assert torch.equal(losses, clean[0])
        assert torch.equal(gradient[..., :37], clean[1][..., :37])
        assert (gradient[..., 37:] == 0).all()


def test_a_retained_graph_leaves_the_logits_alone():
    logits, labels, of_losses = case()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    losses = chunked_cross_entropy(made, labels, 37)
    (first,) = torch.autograd.grad(losses, leaf, of_losses, retain_graph=True)
    assert torch.equal(made, logits)
    (second,) = torch.autograd.grad(losses, leaf, 2 * of_losses, retain_graph=True)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize("writes_past_torch", [False, True])
def test_reading_overwritten_logits_is_an_error(writes_past_torch, monkeypatch):
    def write(rows, labels, denominator, scale, columns, out):
        out.detach().numpy()[:] = 0.5

    if writes_past_torch:  # like a kernel
        monkeypatch.setattr(chunked, "write_gradient", write)
    logits, labels, of_losses = case()
    made = logits.clone().requires_grad_() * 1
    reader = made.square().sum()  # saves the logits
    chunked_cross_entropy(made, labels, 37).backward(of_losses)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reader.backward()


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation made while it is active."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, _types, arguments=(), more=None):
        result = function(*arguments, **(more or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                self.elements = max(self.elements, made.numel())
        return result


def test_the_batch_is_never_whole_in_float32():
    logits, labels, of_losses = case((256,), 50_304, 50_257, torch.bfloat16)
    with LargestFloat32() as ours_makes:
        ours(logits, labels, of_losses, 50_257)
    assert 0 < ours_makes.elements <= chunked.CHUNK_ON_CPU < logits.numel() / 10
    with LargestFloat32() as torchs_makes:  # the measure sees what it should
        cross_entropy(logits.float(), labels)
    assert torchs_makes.elements == logits.numel()


@pytest.mark.parametrize("vocab_size", [5, 20, 33, 40])
def test_halves_of_the_vocabulary_add_up_to_the_whole(vocab_size):
    """Both ranks of a group of two, with the sums over ranks done by hand."""
    logits, labels, of_losses = case(vocab_size=vocab_size)
    flat = labels.flatten()
    halves = [half.contiguous() for half in logits.flatten(0, 1).split(20, dim=1)]
    kept = [min(20, vocab_size), max(0, vocab_size - 20)]
    parts = [chunked.log_sum_exp(half, n) for half, n in zip(halves, kept, strict=True)]
    denominator = torch.logaddexp(*parts)
    predicted = sum(
        chunked._logits_of(half, flat - 20 * rank, kept[rank]) for rank, half in enumerate(halves)
    )
    losses = (denominator - predicted).view_as(of_losses)
    for rank, half in enumerate(halves):
        chunked.write_gradient(
            half, flat - 20 * rank, denominator, of_losses.flatten(), kept[rank], half
        )
    gradient = torch.cat(halves, dim=1).view_as(logits)
    assert_near_torchs((losses, gradient), logits, labels, of_losses, vocab_size)


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton")
    checked = interpreted("tests.unit.model.cross_entropy_kernel_checks")
    assert len(checked) == 24
