"""One step against plain torch: the loss, the gradient, AdamW and the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, train_step

SHAPE = ModelShape(ModelSize(2, 2, 32, 64), vocab_size=100, max_sequence_length=16)
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=3, clip_grad=0.5)
STEPS, NUM_DOMAINS = 8, 3


def micro_batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        text = torch.randint(100, (2, 17), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(2, 16),
            "position_ids": torch.arange(16).expand(2, 16).contiguous(),
            "domain": torch.randint(NUM_DOMAINS, (2,), generator=generator),
        }


def trainer(layout, options=OPTIONS, train_iters=STEPS):
    model = data_parallel([build_model(SHAPE, layout, seed=0)], layout, bf16=False)
    optimizer = build_optimizer(model, options, layout, bf16=False)
    return model, optimizer, build_scheduler(optimizer, options, train_iters)


def steps(layout, count, options=OPTIONS, num_microbatches=3):
    """Train and yield (model, result, learning rate) after each step."""
    model, optimizer, scheduler = trainer(layout, options)
    batches = micro_batches(count * num_microbatches)
    shape = BatchShape(num_microbatches, micro_batch_size=2, seq_length=16)
    passes = Passes(model, shape, NUM_DOMAINS)
    for _ in range(count):
        result = train_step(model, optimizer, scheduler, lambda: passes.forward_backward(batches))
        yield model[0], result, optimizer.param_groups[0]["lr"]


def expected_rate(step, options=OPTIONS, train_iters=STEPS):
    """Linear from 0 to the peak, then half a cosine down to the least at the last step."""
    if step <= options.lr_warmup_iters:
        return options.lr * step / options.lr_warmup_iters
    done = (step - options.lr_warmup_iters) / (train_iters - options.lr_warmup_iters)
    return options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * done)) / 2


def test_the_rate_warms_up_to_the_peak_and_ends_at_the_least(one_rank):
    rates = [rate for _, _, rate in steps(one_rank, STEPS, num_microbatches=1)]
    assert rates == pytest.approx([expected_rate(step) for step in range(1, STEPS + 1)])
    assert rates[0] > 0
    assert rates[OPTIONS.lr_warmup_iters - 1] == OPTIONS.lr == max(rates)
    assert rates[-1] == pytest.approx(OPTIONS.min_lr)


def test_without_warm_up_the_cosine_begins_at_once(one_rank):
    options = OptimizerOptions(lr=1e-2, min_lr=0.0, lr_warmup_iters=0)
    rates = [rate for _, _, rate in steps(one_rank, STEPS, options, num_microbatches=1)]
    assert rates == pytest.approx([expected_rate(s, options) for s in range(1, STEPS + 1)])
    assert rates[-1] == 0.0


def plain_loss(model, batches):
    """Mean cross entropy over the micro-batches, through the same model without its loss."""
    losses = []
    for batch in batches:
        logits = model(batch["tokens"], batch["position_ids"], None)[..., : SHAPE.vocab_size]
        losses.append(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    return torch.stack(losses).mean()


def adamw_direct(model, count, num_microbatches=3):
    """The same training by torch's autograd and the formulas of AdamW, in float64."""
    parameters = dict(model.named_parameters())
    first = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    batches = micro_batches(count * num_microbatches)
    norms = []
    for step in range(1, count + 1):
        loss = plain_loss(model, [next(batches) for _ in range(num_microbatches)])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        norms.append(norm)
        clip = min(1.0, OPTIONS.clip_grad / (norm + 1e-6))
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            g = gradient.double() * clip
            first[name] = OPTIONS.adam_beta1 * first[name] + (1 - OPTIONS.adam_beta1) * g
            second[name] = OPTIONS.adam_beta2 * second[name] + (1 - OPTIONS.adam_beta2) * g * g
            m = first[name] / (1 - OPTIONS.adam_beta1**step)
            v = second[name] / (1 - OPTIONS.adam_beta2**step)
            decay = OPTIONS.weight_decay if parameter.dim() == 2 else 0.0
            update = m / (v.sqrt() + OPTIONS.adam_eps) + decay * parameter.double()
            with torch.no_grad():
                parameter.sub_((expected_rate(step) * update).float())
    return norms


def test_training_is_adamw_with_clipping_and_decay_on_matrices(one_rank):
    count = 4
    trained = list(steps(one_rank, count))
    plain = build_model(SHAPE, one_rank, seed=0)
    norms = adamw_direct(plain, count)
    assert [result.grad_norm for _, result, _ in trained] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > OPTIONS.clip_grad  # or clipping was not tried
    weights = dict(unwrap(trained[-1][0]).named_parameters())
    start = dict(build_model(SHAPE, one_rank, seed=0).named_parameters())
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(weights[name], expected, atol=2e-4, rtol=0, msg=name)
        moved = (expected - start[name]).abs().max()
        assert moved > 2e-3, name  # far more than the tolerance


def test_a_step_reports_loss_and_tokens_per_domain(one_rank):
    (_, result, _) = next(iter(steps(one_rank, 1)))
    model = build_model(SHAPE, one_rank, seed=0)
    expected = torch.zeros(NUM_DOMAINS, 3, dtype=torch.float64)
    for batch in micro_batches(3):
        with torch.no_grad():
            logits = model(batch["tokens"], batch["position_ids"], None)[..., : SHAPE.vocab_size]
        for row, domain in enumerate(batch["domain"].tolist()):
            losses = cross_entropy(logits[row].double(), batch["labels"][row], reduction="sum")
            expected[domain] += torch.tensor([losses.item(), 16.0, 16.0])
    torch.testing.assert_close(result.domain_sums, expected, atol=1e-3, rtol=0)
    assert result.domain_sums[:, 1].sum() == 3 * 2 * 16


def test_micro_batches_do_not_change_the_gradient(one_rank):
    """Three micro-batches of two against one of six."""
    model, optimizer, scheduler = trainer(one_rank)
    parts = list(micro_batches(3))
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    shape = BatchShape(num_microbatches=1, micro_batch_size=6, seq_length=16)
    passes = Passes(model, shape, NUM_DOMAINS)
    once = train_step(model, optimizer, scheduler, lambda: passes.forward_backward(iter([whole])))
    (_, thrice, _) = next(iter(steps(one_rank, 1)))
    assert once.grad_norm == pytest.approx(thrice.grad_norm, rel=1e-5)
    torch.testing.assert_close(once.domain_sums, thrice.domain_sums, atol=1e-3, rtol=0)


def test_the_same_training_twice_is_bit_identical(one_rank):
    weights = []
    for _ in range(2):
        *_, (model, _, _) = steps(one_rank, 3)
        weights.append([p.detach().clone() for p in unwrap(model).parameters()])
    for first, second in zip(*weights, strict=True):
        assert torch.equal(first, second)
