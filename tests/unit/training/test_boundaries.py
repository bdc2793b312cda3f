"""Effect of document boundaries on losses and gradients of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.blend.boundaries import DocumentBoundaries, document_mask
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, train_step

VOCAB_SIZE, LENGTH, NUM_DOMAINS = 100, 24, 3
EOD = VOCAB_SIZE - 1
SHAPE = ModelShape(ModelSize(2, 2, 32, 64), VOCAB_SIZE, max_sequence_length=LENGTH)
# No clipping, and a rate so low that a step leaves the weights unchanged.
OPTIMIZER = OptimizerOptions(lr=1e-12, min_lr=0.0, lr_warmup_iters=0, clip_grad=0.0)
# Difference of summed losses; rounding is less than a tenth of it.
NOTICEABLE = 1e-4
PLAIN = DocumentBoundaryOptions()
OWN_TEXT = DocumentBoundaryOptions(reset_attention_mask=True)
OWN_POSITIONS = DocumentBoundaryOptions(reset_attention_mask=True, reset_position_ids=True)
MASKED_LOSS = DocumentBoundaryOptions(eod_mask_loss=True)


def documents(*lengths, seed=0):
    """Random documents, each with its end-of-document token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat([torch.randint(EOD, (n - 1,), generator=generator), torch.tensor([EOD])])
        for n in lengths
    ]


def batch_of(windows, options, domains=None):
    """A micro-batch of windows [b, LENGTH + 1]."""
    tokens = windows[:, :-1]
    return {
        "tokens": tokens,
        "labels": windows[:, 1:],
        **DocumentBoundaries(EOD, options)(tokens),
        "domain": torch.tensor(domains or [0] * len(windows)),
    }


def step_on(layout, micro_batches, per_token_loss):
    """Run one step; return the model with its gradients, and the result."""
    model = build_model(SHAPE, layout, seed=0, per_token_loss=per_token_loss)
    chunks = data_parallel([model], layout, bf16=False)
    optimizer = build_optimizer(chunks, OPTIMIZER, layout, bf16=False)
    shape = BatchShape(len(micro_batches), len(micro_batches[0]["tokens"]), LENGTH)
    scheduler = build_scheduler(optimizer, OPTIMIZER, train_iters=10)
    passes = Passes(chunks, shape, NUM_DOMAINS)
    result = train_step(
        chunks, optimizer, scheduler, lambda: passes.forward_backward(iter(micro_batches))
    )
    return unwrap(model), result


def loss_of(layout, window, part, options):
    """Summed loss of ``part`` of a window in a training step."""
    batch = batch_of(window[None], options)
    batch["loss_mask"][:] = 0.0
    batch["loss_mask"][:, part] = 1.0
    _, result = step_on(layout, [batch], per_token_loss=True)
    assert result.domain_sums[0, 1] == batch["loss_mask"].sum() > 0
    return result.domain_sums[0, 0].item()


@pytest.mark.parametrize(
    ("options", "looks_back"), [(PLAIN, True), (OWN_TEXT, False), (OWN_POSITIONS, False)], ids=str
)
def test_earlier_documents_affect_losses_unless_attention_is_reset(one_rank, options, looks_back):
    first, other, last, rest = documents(9, 9, 10, 6)
    inside = slice(9, 9 + 10 - 1)  # every token of ``last`` that is predicted from ``last``
    losses = [
        loss_of(one_rank, torch.cat([before, last, rest]), inside, options)
        for before in (first, other)
    ]
    assert (abs(losses[0] - losses[1]) > NOTICEABLE) == looks_back
    assert (losses[0] == losses[1]) == (not looks_back)


def windows_with_ends(*rows, seed=1):
    """Windows [b, LENGTH + 1] with end-of-document tokens at these positions of each."""
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


def masked_micro_batches(options=MASKED_LOSS):
    pairs = zip(ENDS, DOMAINS, strict=True)
    return [batch_of(windows_with_ends(*ends, seed=7), options, where) for ends, where in pairs]


def losses_direct(model, batch):
    """Cross entropies [b, s] by torch, and which of them are not masked."""
    starts = batch.get("document_starts")
    mask = None if starts is None else document_mask(starts)
    logits = model(batch["tokens"], batch["position_ids"], mask)[..., :VOCAB_SIZE]
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.view_as(batch["labels"]), batch["tokens"] != EOD


@pytest.mark.parametrize(
    "options", [MASKED_LOSS, dataclasses.replace(OWN_POSITIONS, eod_mask_loss=True)], ids=str
)
def test_masked_tokens_are_in_neither_gradients_nor_sums(one_rank, options):
    batches = masked_micro_batches(options)
    trained, result = step_on(one_rank, batches, per_token_loss=True)
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
    found = dict(trained.named_parameters())
    for name, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(found[name].main_grad, gradient, atol=1e-6, rtol=1e-5, msg=name)
