"""Compare training steps with plain torch and with megatron's own functions."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Sequence
from importlib.metadata import version

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import clip_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import local_multi_tensor_l2_norm
from packaging.version import Version
from torch.nn.functional import cross_entropy

from megatron_chameleon.blend.boundaries import document_boundaries, document_mask
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model, build_model_chunks, unwrap
from megatron_chameleon.parallel.layout import seed_dropout
from megatron_chameleon.training.optimizer import data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import finalize_gradients
from tests.device_reads import device_reads
from tests.families import FAMILIES, LENGTH
from tests.random_training import RandomTraining, random_batches

SHAPE = ModelConfig(2, 2, 32, 64, vocab_size=100, max_sequence_length=16)
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=3, clip_grad=0.5)
STEPS, NUM_DOMAINS = 8, 3


def micro_batches(*, masked=False):
    for batch in random_batches(SHAPE.vocab_size, 2, 16, NUM_DOMAINS):
        yield {**batch, "loss_mask": (batch["labels"] >= 20 * masked).float()}


class Stepper(RandomTraining):
    """Training steps of a small model; each step has three micro-batches."""

    def __init__(self, layout, *, bf16=False, masked=False):
        settings = {"optimizer": OPTIONS, "train_iters": STEPS, "per_token_loss": masked}
        super().__init__(SHAPE, layout, bf16=bf16, **settings)
        passes = self.passes(3, 2, NUM_DOMAINS)
        self.forward_backward = functools.partial(
            passes.forward_backward, micro_batches(masked=masked)
        )

    def __call__(self):
        return self.step(self.forward_backward)

    @property
    def weights(self):
        return dict(unwrap(self.chunks[0]).named_parameters())


def expected_rate(step):
    """Linear warm-up from 0, then a cosine to the minimum at the last step."""
    if step <= OPTIONS.lr_warmup_iters:
        return OPTIONS.lr * step / OPTIONS.lr_warmup_iters
    done = (step - OPTIONS.lr_warmup_iters) / (STEPS - OPTIONS.lr_warmup_iters)
    return OPTIONS.min_lr + (OPTIONS.lr - OPTIONS.min_lr) * (1 + math.cos(math.pi * done)) / 2


def adamw_direct(model, count):
    """Train with autograd and the formulas of AdamW in float64; return the gradient norms."""
    parameters = dict(model.named_parameters())
    first = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    batches = micro_batches()
    norms = []
    for step in range(1, count + 1):
        losses = []
        for batch in itertools.islice(batches, 3):
            logits = model(batch["tokens"], batch["position_ids"], None)[..., : SHAPE.vocab_size]
            losses.append(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(parameters.values()))
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


def test_training_is_adamw_with_clipping_decay_and_a_cosine_schedule(one_rank):
    step, count = Stepper(one_rank), 4
    start = {name: weight.detach().clone() for name, weight in step.weights.items()}
    plain = build_model(SHAPE, one_rank, seed=0)
    expected = adamw_direct(plain, count)
    assert [step().grad_norm for _ in range(count)] == pytest.approx(expected, rel=1e-4)
    assert max(expected) > OPTIONS.clip_grad
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(step.weights[name], weight, atol=2e-4, rtol=0, msg=name)
        # The comparison is meaningful: weights move far more than the tolerance.
        assert (weight - start[name]).abs().max() > 2e-3, name
    for number in range(count + 1, STEPS + 1):
        step()
        assert step.optimizer.param_groups[0]["lr"] == pytest.approx(expected_rate(number))


def test_only_passes_with_a_backward_pass_have_dropout(one_rank):
    plain, dropped = (
        RandomTraining(SHAPE, one_rank, bf16=False, hidden_dropout=rate, attention_dropout=rate)
        for rate in (0.0, 0.3)
    )
    batches = list(itertools.islice(micro_batches(), 3))
    expected, found = (
        training.passes(3, 2, NUM_DOMAINS).token_losses(batches) for training in (plain, dropped)
    )
    assert all(torch.equal(*losses) for losses in zip(expected, found, strict=True))

    def trained_with(number):
        seed_dropout(one_rank, seed=1, step=number)
        return dropped.passes(3, 2, NUM_DOMAINS).forward_backward(iter(batches))

    losses = [trained_with(number)[:, 0].sum() for number in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] != sum(part.double().sum() for part in expected)


def test_a_step_synchronizes_once(one_rank, monkeypatch):
    """The host reads only the gradient norm, for any number of parameters and micro-batches."""
    for bf16, masked in itertools.product((False, True), repeat=2):
        step = Stepper(one_rank, bf16=bf16, masked=masked)
        step()
        assert device_reads(step, monkeypatch) == 1, (bf16, masked)
    # megatron's own function synchronizes once per tensor.
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    assert device_reads(step, monkeypatch) > len(step.weights)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_rejected_step_changes_neither_weights_nor_moments(one_rank, bf16, sharded):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    step = Stepper(layout, bf16=bf16)
    optimizer = step.optimizer

    def update(value):
        for chunk in step.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for weight in step.weights.values():
            weight.main_grad.fill_(0.1)
        next(iter(step.weights.values())).main_grad.view(-1)[0] = value
        optimizer.prepare_grads()
        norm = optimizer.get_grad_norm()
        assert math.isfinite(norm) == math.isfinite(value)
        if math.isfinite(norm):
            step.model.clip_gradients(norm)
            optimizer.step_with_ready_grads()

    def state():
        (part,) = optimizer.chained_optimizers
        moments = [v for state in part.optimizer.state.values() for v in state.values()]
        return [
            v.detach().clone() for v in [*step.weights.values(), *part.get_parameters(), *moments]
        ]

    step()
    update(0.2)
    before = state()
    for bad in (math.nan, math.inf):
        update(bad)
        assert all(map(torch.equal, before, state()))
    update(0.2)
    assert not all(map(torch.equal, before, state()))


@pytest.mark.parametrize("num_tokens", [None, 0, 1, 37])
def test_gradients_are_finalized_bitwise_as_by_megatron(one_rank, num_tokens, monkeypatch):
    groups = ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "pp", "embd", "pos_embd", "dp_cp"]
    )
    model = build_model_chunks(SHAPE, one_rank, 0, bf16=False, per_token_loss=True)
    chunks = data_parallel(model, one_rank, bf16=False)
    gradients = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers]
    values = [torch.randn_like(gradient) for gradient in gradients]
    found = []
    # megatron's own function reads the token count on the host up to 0.17.
    is_read = Version(version("megatron-core")).release < (0, 18) and num_tokens is not None
    for finalize, reads in ((finalize_model_grads, is_read), (finalize_gradients, 0)):
        torch._foreach_copy_(gradients, values)
        tokens = None if num_tokens is None else torch.tensor(num_tokens, dtype=torch.int)
        finish = functools.partial(finalize, chunks, tokens, pg_collection=groups)
        assert device_reads(finish, monkeypatch) == reads
        found.append([gradient.clone() for gradient in gradients])
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, found[0], values)) == (num_tokens in (None, 0, 1))


def test_models_are_freed(one_rank):
    def models():
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is DistributedDataParallel}

    before = models()
    for sharded in (False, True):
        Stepper(dataclasses.replace(one_rank, use_distributed_optimizer=sharded))()
    assert not models() - before


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_separated_documents_have_the_losses_of_each_document_alone(one_rank, family):
    """Rotary positions are relative, so they are not reset."""
    config = FAMILIES[family]
    model, eod = build_model(config, one_rank, seed=0), config.vocab_size - 1
    window = torch.randint(eod, (1, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    window[:, [4, 5, 20]] = eod
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    options = DocumentBoundaryOptions(not config.is_rotary, reset_attention_mask=True)
    made = document_boundaries(tokens, eod, options)
    mask = document_mask(made["document_starts"])
    found = model(tokens, made["position_ids"], mask, labels=labels)
    alone = []
    for first, last in itertools.pairwise((0, 5, 6, 21, LENGTH)):
        positions = torch.arange(last - first)[None]
        part = tokens[:, first:last].contiguous(), positions, None
        alone.append(model(*part, labels=labels[:, first:last].contiguous()))
    torch.testing.assert_close(found, torch.cat(alone, dim=1), atol=1e-5, rtol=0)
    assert (
        found - model(tokens, torch.arange(LENGTH)[None], None, labels=labels)
    ).abs().max() > 1e-3


FROZEN = OptimizerOptions(lr=1e-12, min_lr=0.0, lr_warmup_iters=0, clip_grad=0.0)
MASKED_LOSS = DocumentBoundaryOptions(eod_mask_loss=True)
ENDS: list[list[Sequence[int]]] = [
    [(3, 9), ()],
    [(1, 2, 3, 4, 5, 12), range(10)],
    [range(17), range(17)],  # no token of this micro-batch has a loss
]
"""Positions of the end-of-document tokens in each sample of each micro-batch."""


@pytest.mark.parametrize(
    "options", [MASKED_LOSS, DocumentBoundaryOptions(True, True, True)], ids=str
)
def test_masked_tokens_are_in_neither_gradients_nor_sums(one_rank, options):
    eod, generator = SHAPE.vocab_size - 1, torch.Generator().manual_seed(7)
    batches = []
    for ends, domains in zip(ENDS, [[0, 1], [1, 2], [2, 2]], strict=True):
        windows = torch.randint(eod, (2, 17), generator=generator)
        for window, places in zip(windows, ends, strict=True):
            window[list(places)] = eod
        tokens = windows[:, :-1]
        masks = document_boundaries(tokens, eod, options)
        domain = torch.tensor(domains)
        batches.append({"tokens": tokens, "labels": windows[:, 1:], **masks, "domain": domain})
    training = RandomTraining(SHAPE, one_rank, bf16=False, optimizer=FROZEN, per_token_loss=True)
    passes = training.passes(len(batches), 2, NUM_DOMAINS)
    result = training.step(lambda: passes.forward_backward(iter(batches)))

    plain = build_model(SHAPE, one_rank, seed=0)
    total, sums = torch.zeros(()), torch.zeros(NUM_DOMAINS, 3, dtype=torch.float64)
    for batch in batches:
        starts = batch.get("document_starts")
        mask = None if starts is None else document_mask(starts)
        logits = plain(batch["tokens"], batch["position_ids"], mask)[..., : SHAPE.vocab_size]
        losses = cross_entropy(logits.mT, batch["labels"], reduction="none")
        counted = batch["tokens"] != eod
        total = total + losses[counted].sum()
        for row, domain in enumerate(batch["domain"].tolist()):
            loss = losses[row][counted[row]].detach().double().sum()
            sums[domain] += torch.tensor([loss, counted[row].sum(), 16])
    assert sums[:, 1].sum() == (2 + 2) * 16 - (2 + 6 + 10)
    torch.testing.assert_close(result.domain_sums, sums, atol=1e-4, rtol=0)
    parameters = dict(plain.named_parameters())
    gradients = torch.autograd.grad(total / sums[:, 1].sum(), list(parameters.values()))
    assert result.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item())
    assert result.grad_norm > 0.1
    found = dict(unwrap(training.chunks[0]).named_parameters())
    for name, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(found[name].main_grad, gradient, atol=1e-6, rtol=1e-5, msg=name)
