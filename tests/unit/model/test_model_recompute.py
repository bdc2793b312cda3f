"""Which recomputation is refused, and that what is allowed changes no gradient."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model_chunks, check_model_layout
from megatron_chameleon.model.recompute import KEEP_ALL
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.recompute import RecomputeOptions

SIZE = ModelSize(num_layers=4, num_attention_heads=4, hidden_size=32, ffn_hidden_size=48)
SHAPE = ModelShape(SIZE, vocab_size=100, max_sequence_length=16)
WORKING = [
    RecomputeOptions("full"),
    RecomputeOptions("full", recompute_num_layers=2),
    RecomputeOptions("full", recompute_method="block", recompute_num_layers=3),
    RecomputeOptions("selective"),
]


def gradients(layout, recompute):
    (model,) = build_model_chunks(SHAPE, layout, seed=0, recompute=recompute)
    text = torch.randint(100, (3, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(3, 16)
    forwards = []
    model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda *_: forwards.append(1))
    losses = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
    losses.mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, len(forwards)


@pytest.mark.parametrize("recompute", WORKING)
def test_gradients_are_bit_identical_and_layers_run_twice(one_rank, recompute):
    expected, once = gradients(one_rank, KEEP_ALL)
    found, twice = gradients(one_rank, recompute)
    assert (once, twice) == (1, 2)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (RecomputeOptions(recompute_method="block"), "--recompute-method block is of"),
        (RecomputeOptions("selective", recompute_num_layers=1), "--recompute-num-layers 1 is of"),
        (RecomputeOptions("full", recompute_num_layers=0), "--recompute-num-layers 0"),
        (RecomputeOptions("full", "block", 5), "chunk has 1 to 4 layers"),
        (RecomputeOptions("full", recompute_num_layers=3), "does not divide the 4 layers"),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(options, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        check_model_layout(SIZE, TrainingParallelOptions(recompute=options), 16)


def test_a_unit_has_to_fit_into_a_virtual_stage():
    recompute = RecomputeOptions("full", recompute_num_layers=2)
    pipelined = TrainingParallelOptions(pipeline_model_parallel_size=2, recompute=recompute)
    check_model_layout(SIZE, pipelined, 16)
    interleaved = dataclasses.replace(pipelined, num_virtual_stages_per_pipeline_rank=2)
    with pytest.raises(UserError, match="chunk has 1 to 1 layers"):
        check_model_layout(SIZE, interleaved, 16)
