from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_chameleon.model.gpt import build_model, transformer_config
from megatron_chameleon.model.layer_norm import SequenceParallelLayerNorm
from megatron_chameleon.model.sizes import ModelShape, ModelSize

SHAPE = ModelShape(ModelSize(2, 2, 16, 32), vocab_size=100, max_sequence_length=8)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_carry_whether_their_gradients_are_summed_over_ranks(sequence_parallel):
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    norm = SequenceParallelLayerNorm(config, 16, eps=1e-5)
    marks = [getattr(parameter, "sequence_parallel", None) for parameter in norm.parameters()]
    assert marks == [sequence_parallel, sequence_parallel]


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_it_normalises_as_the_formula_does(eps):
    norm = SequenceParallelLayerNorm(SimpleNamespace(sequence_parallel=False), 16, eps=eps)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(16, generator=generator))
    hidden = torch.randn(5, 3, 16, generator=generator) * 3 + 1
    x = hidden.double()
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = expected * norm.weight.double() + norm.bias.double()
    torch.testing.assert_close(norm(hidden).double(), expected, atol=1e-5, rtol=0)


def test_every_norm_of_the_model_is_of_this_kind(one_rank):
    model = build_model(SHAPE, one_rank, seed=0)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * SHAPE.size.num_layers + 1
    assert all(isinstance(norm, SequenceParallelLayerNorm) for norm in norms)
    names = {name for name, _ in model.named_parameters() if "layernorm" in name}
    assert len(names) == 2 * len(norms)


def test_a_layout_with_sequence_parallelism_marks_them(one_rank):
    layout = dataclasses.replace(one_rank, sequence_parallel=True, tensor_size=2)
    assert transformer_config(SHAPE, layout, bf16=False).sequence_parallel
    assert not transformer_config(SHAPE, one_rank, bf16=False).sequence_parallel
