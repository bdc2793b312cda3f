"""Gradients side by side: their products and sums against plain float64 arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.memory import TrainingSetup
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.domain_gradients import (
    CHUNK,
    CHUNKS_AT_ONCE,
    GradientRows,
    _parts,
    span_products,
)
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.optimizer import data_parallel

SHAPE = ModelShape(ModelSize(2, 2, 32, 64), vocab_size=100, max_sequence_length=16)
LENGTHS = (1, 100, CHUNK, CHUNK + 1, 3 * CHUNK - 1, CHUNK * CHUNKS_AT_ONCE + CHUNK + 7)


def plain_products(rows):
    return torch.tensor([[(a.double() * b.double()).sum() for b in rows] for a in rows])


@pytest.mark.parametrize("length", LENGTHS)
def test_products_of_long_rows_are_those_of_float64(length):
    generator = torch.Generator().manual_seed(length)
    room = torch.randn(5, length + 10, generator=generator) + 0.5
    rows = room[1:4, 3 : 3 + length]
    expected = plain_products(rows)
    # Sums of CHUNK products are taken in float32, whatever the order.
    rounding = torch.finfo(torch.float32).eps * CHUNK**0.5
    assert (span_products(rows) - expected).abs().max() < rounding * expected.diagonal().max()


@pytest.fixture
def model(one_rank):
    return data_parallel([build_model(SHAPE, one_rank, seed=0)], one_rank, bf16=False)


def filled(model, rows, numbers):
    """Let the gradients be random, keep them in rows ``numbers``, and return them."""
    generator, kept = torch.Generator().manual_seed(0), []
    for number in numbers:
        for buffer in model[0].buffers:
            buffer.grad_data.normal_(generator=generator)
        rows.keep(number)
        kept.append(torch.cat([buffer.grad_data for buffer in model[0].buffers]))
    return torch.stack(kept)


def test_rows_hold_the_gradients_and_give_their_sums(model):
    rows = GradientRows(model, 3)
    kept = filled(model, rows, range(3))
    counted = sum(parameter.numel() for parameter in model[0].parameters())
    assert counted == kept.size(1)  # on one rank nothing is a copy, and nothing is padding
    torch.testing.assert_close(rows.products(3), plain_products(kept), rtol=1e-6, atol=1e-3)
    rows.write_sum(torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64))
    found = torch.cat([buffer.grad_data for buffer in model[0].buffers])
    torch.testing.assert_close(found, 0.5 * kept[0] - 2.0 * kept[2])


def test_the_room_is_what_the_advice_counts(model):
    hook = TrainingHook()
    hook.combines_gradients = True
    setup = TrainingSetup(SHAPE, TrainingParallelOptions(), 1, 2, 1, bf16=False)
    held = sum(part.rows.numel() * part.rows.element_size() for part in _parts(model, 5))
    assert hook.extra_bytes(setup, 0, 5) == {"gradients of 5 domains": held}
    shared = TrainingParallelOptions(use_distributed_optimizer=True)
    sharded = dataclasses.replace(setup, parallel=shared, data_parallel_size=4)
    (of_shards,) = hook.extra_bytes(sharded, 0, 5).values()
    assert of_shards == pytest.approx(held / 4, rel=1e-3)
    assert TrainingHook().extra_bytes(setup, 0, 5) == {}
