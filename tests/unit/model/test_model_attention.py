from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_chameleon.model.attention import SDPACoreAttention, additive_mask
from tests.rounding import assert_as_near

LENGTH, BATCH, HEADS, HEAD_DIM = 11, 3, 4, 8
SCALE = 1 / math.sqrt(HEAD_DIM)


def config_of(**changes):
    settings = {
        "num_layers": 1,
        "hidden_size": HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "cuda_graph_scope": [],
    }
    return TransformerConfig(**{**settings, **changes})


def attention_of(mask_type=AttnMaskType.causal, config=None, **more):
    return SDPACoreAttention(config or config_of(), 1, mask_type, "self", **more)


def heads(seed, groups=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LENGTH, BATCH, n, HEAD_DIM) for n in (HEADS, groups, groups)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attention_direct(query, key, value, masked, scale=SCALE):
    """Softmax attention one head and one query at a time; True in ``masked`` is out."""
    context = torch.zeros(LENGTH, BATCH, HEADS, HEAD_DIM, dtype=query.dtype)
    per_group = HEADS // key.size(2)
    for b in range(BATCH):
        for n in range(HEADS):
            k, v = key[:, b, n // per_group], value[:, b, n // per_group]
            for i in range(LENGTH):
                scores = k @ query[i, b, n] * scale
                weights = scores.masked_fill(masked[b, n, i], -math.inf).softmax(0)
                context[i, b, n] = weights @ v
    return context.reshape(LENGTH, BATCH, -1)


def assert_direct(result, inputs, masked, **more):
    """Compare with the direct formula in float64; its error in the inputs' precision is allowed."""
    q, k, v = inputs
    exact = attention_direct(q.double(), k.double(), v.double(), masked, **more)
    assert_as_near(result, attention_direct(q, k, v, masked, **more), exact)


def causal_mask():
    after = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return after.expand(BATCH, HEADS, LENGTH, LENGTH)


def random_mask(*shape):
    """Masks out half of everything, but never a token's view of itself."""
    mask = torch.rand(*shape, LENGTH, LENGTH, generator=torch.Generator().manual_seed(9)) < 0.5
    return mask & ~torch.eye(LENGTH, dtype=torch.bool)


@pytest.mark.parametrize("seed", range(3))
def test_causal_attention_is_that_of_the_direct_formula(seed):
    q, k, v = heads(seed)
    result = attention_of()(q, k, v, None)
    assert_direct(result, (q, k, v), causal_mask())


def test_without_a_mask_every_token_sees_every_other():
    q, k, v = heads(0)
    result = attention_of(AttnMaskType.no_mask)(q, k, v, None)
    assert_direct(result, (q, k, v), torch.zeros_like(causal_mask()))


@pytest.mark.parametrize("shape", [(BATCH, HEADS), (BATCH, 1), (1, HEADS), (1, 1)])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.arbitrary])
def test_a_given_mask_is_the_only_one(shape, mask_type):
    q, k, v = heads(1)
    mask = random_mask(*shape)
    result = attention_of(mask_type)(q, k, v, mask)
    assert_direct(result, (q, k, v), mask.expand(BATCH, HEADS, LENGTH, LENGTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_gives_the_bits_of_the_boolean_one(dtype):
    mask, results = random_mask(BATCH, 1), []
    for given in (mask, additive_mask(mask, dtype)):
        inputs = [part.requires_grad_() for part in heads(1, dtype=dtype)]
        context = attention_of()(*inputs, given)
        results.append((context, *torch.autograd.grad(context.float().square().sum(), inputs)))
    for boolean, additive in zip(*results, strict=True):
        assert torch.equal(boolean, additive)


def test_the_type_of_the_call_comes_before_that_of_the_constructor():
    q, k, v = heads(2)
    attention = attention_of(AttnMaskType.causal)
    result = attention(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    assert torch.equal(result, attention_of(AttnMaskType.no_mask)(q, k, v, None))
    assert not torch.equal(result, attention(q, k, v, None))


def test_a_mask_type_that_needs_a_mask_is_refused_without_one():
    q, k, v = heads(2)
    with pytest.raises(AssertionError):
        attention_of(AttnMaskType.padding)(q, k, v, None)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_may_share_keys_and_values(groups):
    q, k, v = heads(3, groups=groups)
    result = attention_of(config=config_of(num_query_groups=groups))(q, k, v, None)
    assert_direct(result, (q, k, v), causal_mask())


def test_another_scale_can_be_given():
    q, k, v = heads(4)
    result = attention_of(softmax_scale=0.7)(q, k, v, None)
    assert_direct(result, (q, k, v), causal_mask(), scale=0.7)


def test_bf16_stays_bf16():
    q, k, v = heads(5, dtype=torch.bfloat16)
    result = attention_of()(q, k, v, None)
    assert result.dtype == torch.bfloat16
    assert_direct(result, (q, k, v), causal_mask())


@pytest.mark.parametrize(
    ("argument", "value", "problem"),
    [
        ("attention_bias", torch.zeros(LENGTH, LENGTH), "attention bias"),
        ("packed_seq_params", object(), "packed sequences"),
    ],
)
def test_what_a_call_cannot_honour_is_refused(argument, value, problem):
    q, k, v = heads(6)
    with pytest.raises(AssertionError, match=problem):
        attention_of()(q, k, v, None, **{argument: value})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"window_size": (4, 0)}, "sliding windows"),
        ({"softmax_type": "off-by-one"}, "plain softmax"),
    ],
)
def test_what_the_configuration_asks_in_vain_is_refused(changes, problem):
    with pytest.raises(AssertionError, match=problem):
        attention_of(config=config_of(**changes))


def test_dropout_in_place_of_the_configurations_is_refused():
    with pytest.raises(AssertionError, match="dropout"):
        attention_of(attention_dropout=0.1)


@pytest.mark.parametrize("mask", [None, random_mask(BATCH, 1)], ids=["causal", "given"])
def test_it_equals_megatrons_unfused_attention_and_its_gradients(one_rank, mask):
    results = []
    for kind in (SDPACoreAttention, DotProductAttention):
        # In float64, where no tolerance depends on the processor.
        inputs = [part.requires_grad_() for part in heads(7, dtype=torch.float64)]
        attention = kind(config_of(), 1, AttnMaskType.causal, "self")
        given = causal_mask()[:, :1] if mask is None and kind is DotProductAttention else mask
        # Megatron's applies its causal mask only when it is given none.
        mask_type = AttnMaskType.causal if mask is None else AttnMaskType.arbitrary
        context = attention(*inputs, given, attn_mask_type=mask_type)
        gradients = torch.autograd.grad(context.square().sum(), inputs)
        results.append((context, *gradients))
    for ours, megatrons in zip(*results, strict=True):
        torch.testing.assert_close(ours, megatrons, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("head_dim", "multiple"), [(50, 8), (50, 64), (64, 8)])
@pytest.mark.parametrize("mask", [None, random_mask(BATCH, 1)], ids=["causal", "given"])
def test_padding_heads_changes_nothing(head_dim, multiple, mask):
    """Neither results nor gradients; the scale stays that of the real heads."""
    config = config_of(hidden_size=HEADS * head_dim)
    results = []
    for head_dim_multiple in (1, multiple):
        generator = torch.Generator().manual_seed(8)
        shape = (LENGTH, BATCH, HEADS, head_dim)
        inputs = [torch.randn(shape, generator=generator).double() for _ in range(3)]
        inputs = [part.requires_grad_() for part in inputs]
        attention = attention_of(config=config)
        attention.head_dim_multiple = head_dim_multiple
        context = attention(*inputs, mask)
        assert context.shape == (LENGTH, BATCH, HEADS * head_dim)
        results.append((context, *torch.autograd.grad(context.square().sum(), inputs)))
    for padded, plain in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, atol=1e-12, rtol=1e-12)
