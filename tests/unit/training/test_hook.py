"""Compare losses and gradients of hooked steps with autograd, and dot products with float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.training import hook as hook_module
from megatron_chameleon.training.domain_gradients import (
    CHUNK,
    CHUNKS_AT_ONCE,
    micro_batches_by_domain,
    span_products,
)
from megatron_chameleon.training.hook import HookRunner, TrainingHook
from tests.device_reads import device_reads
from tests.random_training import RandomTraining, random_batches

SHAPE = ModelConfig(2, 2, 32, 64, vocab_size=100, max_sequence_length=16)
NUM_DOMAINS, MICRO_BATCHES, ROWS = 4, 3, 2
RATE = 0.25
# Domain 2 has no sample.
DOMAINS = [[0, 1], [1, 3], [1, 0]]


@pytest.fixture
def micro_batches():
    generator = torch.Generator().manual_seed(0)
    batches = list(itertools.islice(random_batches(100, ROWS, 16), MICRO_BATCHES))
    for batch, domains in zip(batches, DOMAINS, strict=True):
        batch["loss_mask"] = (torch.rand(ROWS, 16, generator=generator) < 0.8).float()
        batch["domain"] = torch.tensor(domains)
    return batches


def build_passes(layout, *, per_token):
    training = RandomTraining(SHAPE, layout, bf16=False, per_token_loss=per_token)
    return training.passes(MICRO_BATCHES, ROWS, NUM_DOMAINS)


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def gradient(passes):
    """Gradient buffers, concatenated to a vector."""
    model = unwrap(passes.model[0])
    return torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).clone()


def losses_of(passes, batch):
    return passes.model[0](batch["tokens"], batch["position_ids"], None, labels=batch["labels"])


def expected_gradient(passes, micro_batches, token_weights):
    """Gradient of the sum of losses [b, s] times weights [b, s], computed by autograd."""
    parameters = list(unwrap(passes.model[0]).parameters())
    total = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for batch, weights in zip(micro_batches, token_weights, strict=True):
        loss = (losses_of(passes, batch) * weights).sum()
        parts = torch.autograd.grad(loss, parameters)
        total += torch.cat([part.flatten() for part in parts])
    return total


def domain_mask(batch, domain):
    return batch["loss_mask"] * (batch["domain"] == domain)[:, None]


def run(hook, passes, micro_batches, layout):
    for chunk in passes.model:
        chunk.zero_grad_buffer()
    hooked = HookRunner(hook, passes, SHAPE, layout)
    sums = hooked.forward_backward(iter(micro_batches), step=5, learning_rate=RATE)
    return sums, gradient(passes)


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_weights_have_the_expected_gradient_of_another_mixture(
    one_rank, micro_batches, per_token
):
    """With samples of the mixture q and loss weights w/q, the gradient is that of the mixture w."""
    sampled = torch.bincount(torch.tensor(DOMAINS).flatten(), minlength=NUM_DOMAINS) / 6.0
    wanted = torch.tensor([0.2, 0.7, 0.0, 0.1])
    for batch in micro_batches:
        batch["loss_mask"] = torch.ones(ROWS, 16)
    plain = build_passes(one_rank, per_token=per_token)
    passes = dataclasses.replace(plain, loss_weights=wanted / sampled.clamp(min=0.1))
    sums, found = run(TrainingHook(), passes, micro_batches, one_rank)
    means = [wanted / (sampled * 6 * 16).clamp(min=1) for _ in micro_batches]
    weights = [
        mean[batch["domain"]][:, None] for mean, batch in zip(means, micro_batches, strict=True)
    ]
    expected = expected_gradient(passes, micro_batches, weights)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert torch.equal(sums, run(TrainingHook(), plain, micro_batches, one_rank)[0])


class Combiner(TrainingHook):
    combines_gradients = True

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def gradient_weights(self, gradients):
        self.products = gradients.dot_products()
        self.present, self.rate = gradients.present, gradients.learning_rate
        return torch.tensor(self.weights, dtype=torch.float64)


def test_hook_reads_token_losses_and_weights_them(passes, micro_batches, one_rank):
    class Weigher(TrainingHook):
        weights: torch.Tensor | None = None

        def loss_weights(self, batch):
            self.step, self.losses = batch.step, batch.token_losses()
            self.sums, self.tokens = batch.domain_sums(self.losses), batch.domain_tokens
            return self.weights

    hook = Weigher()
    sums, found = run(hook, passes, micro_batches, one_rank)
    for chunk in passes.model:
        chunk.zero_grad_buffer()
    plain_sums = passes.forward_backward(iter(micro_batches))
    assert torch.equal(found, gradient(passes))  # the standard gradient
    assert torch.equal(sums, plain_sums)
    assert hook.step == 5
    for batch, losses in zip(micro_batches, hook.losses, strict=True):
        torch.testing.assert_close(losses, losses_of(passes, batch).detach())
    torch.testing.assert_close(hook.sums, plain_sums[:, 0])
    torch.testing.assert_close(hook.tokens, plain_sums[:, 1])
    assert hook.tokens[2] == 0

    hook.weights = torch.tensor([0.5, 2.0, 7.0, 0.0])
    for per_token in (True, False):  # without per-token loss, no token may be masked
        passes = passes if per_token else build_passes(one_rank, per_token=False)
        for batch in micro_batches:
            batch["loss_mask"] = batch["loss_mask"].clamp(min=float(not per_token))
        num_tokens = sum(batch["loss_mask"].sum() for batch in micro_batches)
        weights = [
            batch["loss_mask"] * hook.weights[batch["domain"]][:, None] / num_tokens
            for batch in micro_batches
        ]
        sums, found = run(hook, passes, micro_batches, one_rank)
        expected = expected_gradient(passes, micro_batches, weights)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
        assert sums[3, 0] > 0  # the logged losses are not weighted


def test_domain_gradients_equal_autograd_and_combine_by_weight(
    passes, micro_batches, one_rank, monkeypatch
):
    hook = Combiner([0.25, -1.5, 9.0, 3.0])
    _, found = run(hook, passes, micro_batches, one_rank)
    gradients = torch.zeros(NUM_DOMAINS, found.numel())
    for domain in (0, 1, 3):
        masks = [domain_mask(batch, domain) for batch in micro_batches]
        num_tokens = sum(mask.sum() for mask in masks)
        gradients[domain] = expected_gradient(
            passes, micro_batches, [mask / num_tokens for mask in masks]
        )
    assert (hook.present, hook.rate) == ([0, 1, 3], RATE)
    expected = gradients.double() @ gradients.double().T
    torch.testing.assert_close(hook.products, expected, atol=1e-6, rtol=1e-4)
    combined = 0.25 * gradients[0] - 1.5 * gradients[1] + 3.0 * gradients[3]
    torch.testing.assert_close(found, combined, atol=1e-6, rtol=1e-4)
    # The host waits three times: for the samples' domains, their token counts and the padding.
    assert device_reads(lambda: run(hook, passes, micro_batches, one_rank), monkeypatch) == 3
    assert hook.flops == 0  # with one pipeline stage, no padding samples are added

    def on_two_stages(*arguments, **options):
        return micro_batches_by_domain(*arguments, **{**options, "pipeline": 2})

    monkeypatch.setattr(hook_module, "micro_batches_by_domain", on_two_stages)
    run(hook, passes, micro_batches, one_rank)
    # On two stages, micro-batches of a domain have the same size. Domain 1 has three samples in two
    # micro-batches, so one padding sample is added.
    assert hook.flops == training_flops(SHAPE, 16, 16)


LENGTHS = (1, 100, CHUNK, CHUNK + 1, 3 * CHUNK - 1, CHUNK * CHUNKS_AT_ONCE + CHUNK + 7)


def plain_products(rows):
    return torch.tensor([[(a.double() * b.double()).sum() for b in rows] for a in rows])


@pytest.mark.parametrize("length", LENGTHS)
def test_dot_products_equal_float64_within_rounding(length):
    generator = torch.Generator().manual_seed(length)
    storage = torch.randn(5, length + 10, generator=generator) + 0.5
    rows = storage[1:4, 3 : 3 + length]
    expected = plain_products(rows)
    # The order of the float32 additions within a chunk of CHUNK products is unspecified.
    rounding = torch.finfo(torch.float32).eps * CHUNK**0.5
    assert (span_products(rows) - expected).abs().max() < rounding * expected.diagonal().max()
