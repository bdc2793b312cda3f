"""Gradients are finished as megatron finishes them; the layouts are in tests/distributed."""

from __future__ import annotations

import functools

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training.optimizer import data_parallel
from megatron_chameleon.training.step import finalize_gradients
from tests.device_reads import device_reads

SHAPE = ModelShape(ModelSize(1, 2, 16, 32), vocab_size=50, max_sequence_length=8)


def gradients(chunks):
    return [buffer.grad_data for chunk in chunks for buffer in chunk.buffers]


@pytest.mark.parametrize("num_tokens", [None, 0, 1, 37])
def test_the_gradients_are_megatrons_to_the_bit(one_rank, num_tokens, monkeypatch):
    groups = ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "pp", "embd", "pos_embd", "dp_cp"]
    )
    model = build_model_chunks(SHAPE, one_rank, 0, bf16=False, per_token_loss=True)
    chunks = data_parallel(model, one_rank, bf16=False)
    values = torch.Generator().manual_seed(1)
    for part in gradients(chunks):
        part.normal_(generator=values)
    given = [part.clone() for part in gradients(chunks)]
    found = []
    for finalize, waits in (
        (finalize_model_grads, num_tokens is not None),
        (finalize_gradients, 0),
    ):
        for part, value in zip(gradients(chunks), given, strict=True):
            part.copy_(value)
        tokens = None if num_tokens is None else torch.tensor(num_tokens, dtype=torch.int)
        finish = functools.partial(finalize, chunks, tokens, pg_collection=groups)
        assert device_reads(finish, monkeypatch) == waits
        found.append([part.clone() for part in gradients(chunks)])
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, found[0], given)) == (num_tokens in (None, 0, 1))
