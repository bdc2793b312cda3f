"""Losses and gradients of a training step with masked tokens, compared with plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.blend.boundaries import DocumentBoundaries, document_mask
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.options import OptimizerOptions
from tests.random_training import RandomTraining

VOCAB_SIZE, LENGTH, NUM_DOMAINS = 100, 24, 3
EOD = VOCAB_SIZE - 1
SHAPE = ModelShape(ModelSize(2, 2, 32, 64), VOCAB_SIZE, max_sequence_length=LENGTH)
# No clipping, and a rate so low that a step leaves the weights unchanged.
OPTIMIZER = OptimizerOptions(lr=1e-12, min_lr=0.0, lr_warmup_iters=0, clip_grad=0.0)
MASKED_LOSS = DocumentBoundaryOptions(eod_mask_loss=True)


def batch_of(windows, options, domains):
    """A micro-batch of windows [b, LENGTH + 1]."""
    tokens = windows[:, :-1]
    return {
        "tokens": tokens,
        "labels": windows[:, 1:],
        **DocumentBoundaries(EOD, options)(tokens),
        "domain": torch.tensor(domains),
    }


def windows_with_ends(*rows, seed=1):
    """Windows [b, LENGTH + 1]; each row lists the positions of its end-of-document tokens."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(EOD, (len(rows), LENGTH + 1), generator=generator)
    for row, places in enumerate(rows):
        windows[row, list(places)] = EOD
    return windows


EVERYWHERE = range(LENGTH + 1)
# Masked positions differ between micro-batches; the last one is masked entirely.
ENDS: list[list[Sequence[int]]] = [
    [(3, 9), ()],
    [(1, 2, 3, 4, 5, 20), tuple(range(18))],
    [EVERYWHERE, EVERYWHERE],
]
DOMAINS = [[0, 1], [1, 2], [2, 2]]


def masked_micro_batches(options):
    pairs = zip(ENDS, DOMAINS, strict=True)
    return [batch_of(windows_with_ends(*ends, seed=7), options, where) for ends, where in pairs]


def losses_direct(model, batch):
    """Cross entropies [b, s] computed by torch, and a mask of those that count."""
    starts = batch.get("document_starts")
    mask = None if starts is None else document_mask(starts)
    logits = model(batch["tokens"], batch["position_ids"], mask)[..., :VOCAB_SIZE]
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.view_as(batch["labels"]), batch["tokens"] != EOD


@pytest.mark.parametrize(
    "options", [MASKED_LOSS, DocumentBoundaryOptions(True, True, True)], ids=str
)
def test_masked_tokens_are_in_neither_gradients_nor_sums(one_rank, options):
    batches = masked_micro_batches(options)
    training = RandomTraining(SHAPE, one_rank, bf16=False, optimizer=OPTIMIZER, per_token_loss=True)
    passes = training.passes(len(batches), len(DOMAINS[0]), NUM_DOMAINS)
    result = training.step(lambda: passes.forward_backward(iter(batches)))
    plain = build_model(SHAPE, one_rank, seed=0)
    total, count = torch.zeros(()), 0
    sums = torch.zeros(NUM_DOMAINS, 3, dtype=torch.float64)
    for batch in batches:
        losses, counted = losses_direct(plain, batch)
        total, count = total + losses[counted].sum(), count + int(counted.sum())
        for row, domain in enumerate(batch["domain"].tolist()):
            row_sum = losses[row][counted[row]].detach().double().sum()
            sums[domain] += torch.tensor([row_sum, counted[row].sum(), LENGTH])
    assert count == (2 + 2) * LENGTH - (2 + 6 + 18)
    torch.testing.assert_close(result.domain_sums, sums, atol=1e-4, rtol=0)
    parameters = dict(plain.named_parameters())
    gradients = torch.autograd.grad(total / count, list(parameters.values()))
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    assert result.grad_norm == pytest.approx(norm)
    assert result.grad_norm > 0.1
    found = dict(unwrap(training.chunks[0]).named_parameters())
    for name, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(found[name].main_grad, gradient, atol=1e-6, rtol=1e-5, msg=name)
