"""Compare attention with megatron's, and recomputation with stored activations."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import rms_norm

from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.layers import (
    SDPACoreAttention,
    SequenceParallelRMSNorm,
    additive_mask,
)
from megatron_chameleon.parallel.layout import seed_dropout
from megatron_chameleon.parallel.options import RecomputeOptions

LENGTH, BATCH, HEADS, HEAD_DIM = 7, 2, 4, 8


def config_of(**changes):
    settings = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
    dropouts = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return TransformerConfig(**settings | dropouts | {"cuda_graph_scope": []} | changes)


def heads(seed, groups=HEADS, head_dim=HEAD_DIM):
    """Make inputs in float64, so that tolerances do not depend on the processor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LENGTH, BATCH, n, head_dim) for n in (HEADS, groups, groups)]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [part.requires_grad_() for part in parts]


def random_mask(*shape):
    """Mask half of all pairs at random; each token attends at least to itself."""
    mask = torch.rand(*shape, LENGTH, LENGTH, generator=torch.Generator().manual_seed(9)) < 0.5
    return mask & ~torch.eye(LENGTH, dtype=torch.bool)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(
    "mask", [None, random_mask(BATCH, 1), random_mask(1, 1)], ids=["causal", "per sample", "shared"]
)
def test_attention_and_its_gradients_equal_megatrons(one_rank, groups, mask, dropout):
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(BATCH, 1, LENGTH, LENGTH)
    # Megatron's attention applies its causal mask only if no other mask is passed.
    mask_type = AttnMaskType.causal if mask is None else AttnMaskType.arbitrary
    results = []
    for kind in (SDPACoreAttention, DotProductAttention):
        inputs = heads(7, groups)
        config = config_of(num_query_groups=groups, attention_dropout=dropout)
        attention = kind(config, 1, AttnMaskType.causal, "self")
        seed_dropout(one_rank, seed=5, step=3)
        used = causal if mask is None and kind is DotProductAttention else mask
        context = attention(*inputs, used, attn_mask_type=mask_type)
        gradients = torch.autograd.grad(context.square().sum(), inputs)
        results.append((context, *gradients))
        if mask is not None and kind is SDPACoreAttention:
            seed_dropout(one_rank, seed=5, step=3)
            assert torch.equal(attention(*inputs, additive_mask(mask, torch.float64)), context)
    for ours, megatrons in zip(*results, strict=True):
        torch.testing.assert_close(ours, megatrons, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("head_dim", "multiple"), [(50, 64), (64, 8)])
@pytest.mark.parametrize("mask", [None, random_mask(BATCH, 1)], ids=["causal", "random"])
def test_padding_the_head_dimension_does_not_change_attention(head_dim, multiple, mask):
    config = config_of(hidden_size=HEADS * head_dim)
    results = []
    for head_dim_multiple in (1, multiple):
        inputs = heads(8, head_dim=head_dim)
        attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self")
        attention.head_dim_multiple = head_dim_multiple
        context = attention(*inputs, mask)
        assert context.shape == (LENGTH, BATCH, HEADS * head_dim)
        results.append((context, *torch.autograd.grad(context.square().sum(), inputs)))
    for padded, plain in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_and_its_gradients_equal_torchs(dtype):
    generator = torch.Generator().manual_seed(3)
    values, weight = (torch.randn(s, generator=generator) for s in ((LENGTH, BATCH, 24), (24,)))
    norm = SequenceParallelRMSNorm(config_of(), 24, eps=1e-3).to(dtype)
    norm.weight.data.copy_(weight)
    results = []
    for function in (norm, lambda states: rms_norm(states, (24,), norm.weight, 1e-3)):
        states = values.to(dtype).requires_grad_()
        output = function(states)
        gradients = torch.autograd.grad(output.square().sum(), (states, norm.weight))
        results.append((output, *gradients))
    for ours, torchs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, torchs)


CONFIG = ModelConfig(4, 4, 32, 48, vocab_size=100, max_sequence_length=16)


def gradients(layout, recompute):
    rates = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    (model,) = build_model_chunks(CONFIG, layout, seed=0, recompute=recompute, **rates)
    seed_dropout(layout, seed=5, step=3)
    text = torch.randint(100, (3, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(3, 16)
    forwards = []
    model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda *_: forwards.append(1))
    losses = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
    losses.mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, len(forwards)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeOptions("full", recompute_num_layers=2),
        RecomputeOptions("full", recompute_method="block", recompute_num_layers=3),
        RecomputeOptions("selective"),
    ],
)
def test_recomputed_gradients_are_bit_identical(one_rank, recompute):
    expected, once = gradients(one_rank, None)
    found, twice = gradients(one_rank, recompute)
    assert (once, twice) == (1, 2)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.equal(found[name], gradient), name
