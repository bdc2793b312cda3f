"""A swarm on a GPU: the same losses and gradients as on the CPU, and bfloat16 near them."""

from __future__ import annotations

import torch

from megatron_chameleon.methods.swarm.stacked_gpt import StackedGPT, initial_weights
from megatron_chameleon.model.sizes import ModelShape, model_size

SHAPE = ModelShape(model_size("1m"), 50_257, 128)
MEMBERS, ROWS = 3, 2


def stack_on(device, *, bf16):
    weights = initial_weights(SHAPE, range(MEMBERS), torch.device(device))
    return StackedGPT(SHAPE, weights, bf16=bf16)


def passed(device, *, bf16):
    """Summed losses and gradients of one pass, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(SHAPE.vocab_size, (MEMBERS, ROWS, 129), generator=generator).to(device)
    stacked = stack_on(device, bf16=bf16)
    losses = stacked.forward_backward(text[..., :-1], text[..., 1:], 1 / (ROWS * 128))
    return losses.cpu(), {n: p.grad.cpu() for n, p in stacked.weights.items() if p.grad is not None}


def test_a_gpu_finds_what_the_cpu_finds():
    (losses, gradients), (expected, of_cpu) = passed("cuda", bf16=False), passed("cpu", bf16=False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for name, gradient in of_cpu.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_bfloat16_is_near():
    (losses, gradients), (expected, of_cpu) = passed("cuda", bf16=True), passed("cpu", bf16=False)
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)
    for name, gradient in of_cpu.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 0.05, name
