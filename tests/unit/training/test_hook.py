"""What a hook sees of a step, and what the step becomes by what it decides, against autograd."""

from __future__ import annotations

import pytest
import torch

from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.domain_gradients import (
    micro_batches_by_domain,
    split_samples,
)
from megatron_chameleon.training.hook import HookRunner, TrainingHook
from megatron_chameleon.training.optimizer import build_optimizer, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes
from tests.device_reads import device_reads

SHAPE = ModelShape(ModelSize(2, 2, 32, 64), vocab_size=100, max_sequence_length=16)
NUM_DOMAINS, MICRO_BATCHES, ROWS = 4, 3, 2
RATE = 0.25
# Domain 2 has no sample.
DOMAINS = [0, 1, 1, 3, 1, 0]


@pytest.fixture
def micro_batches():
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(MICRO_BATCHES):
        text = torch.randint(100, (ROWS, 17), generator=generator)
        mask = (torch.rand(ROWS, 16, generator=generator) < 0.8).float()
        batches.append(
            {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "loss_mask": mask,
                "position_ids": torch.arange(16).expand(ROWS, 16),
                "domain": torch.tensor(DOMAINS[number * ROWS : (number + 1) * ROWS]),
            }
        )
    return batches


def build_passes(layout, *, per_token):
    model = build_model(SHAPE, layout, seed=0, per_token_loss=per_token)
    chunks = data_parallel([model], layout, bf16=False)
    build_optimizer(chunks, OptimizerOptions(), layout, bf16=False)  # it finishes gradients
    return Passes(chunks, BatchShape(MICRO_BATCHES, ROWS, 16), NUM_DOMAINS)


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def gradient(passes):
    """What the gradient buffers hold, parameter by parameter, in one vector."""
    model = unwrap(passes.model[0])
    return torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).clone()


def losses_of(passes, batch):
    return passes.model[0](batch["tokens"], batch["position_ids"], None, labels=batch["labels"])


def expected_gradient(passes, micro_batches, token_weights):
    """That of the sum of losses [b, s] times weights [b, s], by autograd."""
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


class Onlooker(TrainingHook):
    """Changes nothing."""

    def loss_weights(self, batch):
        self.batch = batch
        self.losses = batch.token_losses()
        self.sums = batch.domain_sums(self.losses)
        self.tokens = batch.domain_tokens


class Weigher(TrainingHook):
    def __init__(self, weights):
        super().__init__()
        self.weights = torch.tensor(weights)

    def loss_weights(self, batch):
        return self.weights


class Combiner(TrainingHook):
    combines_gradients = True

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def gradient_weights(self, gradients):
        self.products = gradients.dot_products()
        self.present, self.rate = gradients.present, gradients.learning_rate
        return torch.tensor(self.weights, dtype=torch.float64)


def test_an_onlooker_sees_every_loss_and_changes_none(passes, micro_batches, one_rank):
    hook = Onlooker()
    sums, hooked = run(hook, passes, micro_batches, one_rank)
    for chunk in passes.model:
        chunk.zero_grad_buffer()
    plain_sums = passes.forward_backward(iter(micro_batches))
    assert torch.equal(hooked, gradient(passes))
    assert torch.equal(sums, plain_sums)
    assert hook.batch.step == 5
    for batch, losses in zip(micro_batches, hook.losses, strict=True):
        torch.testing.assert_close(losses, losses_of(passes, batch).detach())
    torch.testing.assert_close(hook.sums, plain_sums[:, 0])
    torch.testing.assert_close(hook.tokens, plain_sums[:, 1])
    assert hook.tokens[2] == 0


@pytest.mark.parametrize("per_token", [True, False])
def test_losses_count_by_the_weight_of_their_domain(micro_batches, one_rank, per_token):
    weights = [0.5, 2.0, 7.0, 0.0]
    if not per_token:
        for batch in micro_batches:
            batch["loss_mask"][:] = 1.0
    passes = build_passes(one_rank, per_token=per_token)
    sums, found = run(Weigher(weights), passes, micro_batches, one_rank)
    num_tokens = sum(batch["loss_mask"].sum() for batch in micro_batches)
    expected = expected_gradient(
        passes,
        micro_batches,
        [
            batch["loss_mask"] * torch.tensor(weights)[batch["domain"]][:, None] / num_tokens
            for batch in micro_batches
        ],
    )
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
    # What is logged are the losses themselves.
    assert sums[3, 0] > 0


def test_gradients_of_domains_are_those_of_their_mean_losses(passes, micro_batches, one_rank):
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


def test_samples_that_fill_up_are_counted_as_cost(passes, micro_batches, one_rank):
    """On one stage nothing has to be filled up."""
    hook = Combiner([1.0] * NUM_DOMAINS)
    run(hook, passes, micro_batches, one_rank)
    assert hook.flops == 0

    class OnTwoStages(HookRunner):
        def _split(self, samples):
            return split_samples(samples, ROWS, pipeline=2)

    hooked = OnTwoStages(hook, passes, SHAPE, one_rank)
    hooked.forward_backward(iter(micro_batches), step=0, learning_rate=RATE)
    # Domains 0, 1 and 3 have two, three and one samples: one fills up the second one's.
    assert hook.flops == training_flops(SHAPE, 16, 16)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_micro_batches_by_domain_have_them_all_and_no_others(micro_batches, pipeline):
    whole = torch.cat([batch["tokens"] for batch in micro_batches])
    of_domains = dict(enumerate([[0, 5], [1, 2, 4], [], [3], [5, 4, 3, 1, 0]]))
    splits = {d: split_samples(len(rows), ROWS, pipeline) for d, rows in of_domains.items()}
    found = micro_batches_by_domain(micro_batches, of_domains, splits)
    for domain, split in splits.items():
        parts, rows = found[domain], of_domains[domain]
        masks = torch.cat([part["loss_mask"] for part in parts])
        tokens = torch.cat([part["tokens"] for part in parts])
        assert torch.equal(tokens[: len(rows)], whole[rows])
        assert not masks[len(rows) :].any()
        sizes = [len(part["tokens"]) for part in parts]
        assert (len(sizes), max(sizes), sum(sizes)) == (split.count, split.size, split.filled)
        assert max(sizes) - min(sizes) <= (pipeline == 1)
        assert 1 <= min(sizes) <= max(sizes) <= ROWS
    # The micro-batches that were given keep their masks.
    assert all(batch["loss_mask"].any() for batch in micro_batches)


def test_gradients_of_domains_are_read_from_the_device_once(
    passes, micro_batches, one_rank, monkeypatch
):
    """Whatever the domains, the buckets and the micro-batches."""
    hook = Combiner([1.0] * NUM_DOMAINS)
    run(hook, passes, micro_batches, one_rank)
    reads = device_reads(lambda: run(hook, passes, micro_batches, one_rank), monkeypatch)
    # The domains of the samples, their tokens, and what fills up.
    assert reads == 3
