"""Cross-entropy kernels on a GPU equal a float64 reference, with a vocabulary of realistic size."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.model import cross_entropy as chunked


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_float64(
    dtype: torch.dtype, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(chunked, "has_kernels", lambda _rows: False)
    logits = (4 * torch.randn(300, 50_304, device="cuda")).to(dtype)
    labels = torch.randint(50_257, (300,), device="cuda")
    scale = torch.randn(300, device="cuda")
    right_leaf = logits.double().requires_grad_()
    right = cross_entropy(right_leaf[:, :50_257], labels, reduction="none")
    right.backward(scale.double())
    leaf = logits.clone().requires_grad_()
    losses = chunked.chunked_cross_entropy(leaf * 1, labels, 50_257)
    losses.backward(scale)
    torch.testing.assert_close(losses.double(), right, atol=1e-5, rtol=1e-6)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-4
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), right_leaf.grad, atol=1e-7, rtol=rounding)


def test_the_batch_is_never_whole_in_float32() -> None:
    logits = torch.randn(8192, 50_304, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(50_257, (8192,), device="cuda")
    made = logits * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked.chunked_cross_entropy(made, labels, 50_257).mean().backward()
    beyond = torch.cuda.max_memory_allocated() - before
    # The gradient of the logits is the only allocation as large as the logits.
    assert beyond < 1.2 * made.numel() * made.element_size()
