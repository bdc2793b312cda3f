"""Conversion of weights and settings to transformers' GPT-2 and back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.huggingface import (
    GPT2Config,
    checked_tensors,
    config_of_shape,
    huggingface_tensors,
    load_huggingface,
    read_config,
    shape_of_config,
    to_huggingface,
)
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from tests.rounding import assert_as_near

SHAPES = {
    "tiny": ModelShape(ModelSize(2, 4, 32, 128), vocab_size=101, max_sequence_length=20),
    "head dimension 50": ModelShape(ModelSize(2, 3, 150, 600), 257, 24),
    "wide MLP, no padding": ModelShape(ModelSize(3, 2, 48, 80), 256, 16),
    "tanh": ModelShape(ModelSize(2, 4, 32, 128), 101, 20, activation="gelu_tanh"),
}
SHAPE = SHAPES["tiny"]
CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 101}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def theirs_of(shape):
    """Make transformers' model of the shape, with biases and norms that are also random."""
    config = transformers.GPT2Config(**config_of_shape(shape, torch.float32, eod_id=0))
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sampled = 0.2 * torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(1 + sampled if is_norm else sampled)
    return model


def logits_of(model, shape):
    """Return the logits [b, s, v] of random tokens at all positions."""
    generator = torch.Generator().manual_seed(3)
    length = shape.max_sequence_length
    tokens = torch.randint(shape.vocab_size, (3, length), generator=generator)
    with torch.no_grad():
        if isinstance(model, transformers.GPT2LMHeadModel):
            return model(tokens).logits
        return model(tokens, torch.arange(length).expand_as(tokens), None)[..., : shape.vocab_size]


def test_logits_equal_those_of_transformers_and_weights_convert_back(one_rank, shape):
    theirs = theirs_of(shape)
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert dict(huggingface_tensors(shape).values()) == shapes
    tensors = checked_tensors(theirs.state_dict(), shape, "there")
    model = build_model(shape, one_rank, seed=0).eval()
    load_huggingface(model, tensors, shape)
    logits, reference = logits_of(model, shape), logits_of(theirs, shape)
    assert reference.std() > 0.1
    # Our logits may have the same float32 error as the logits of transformers' model.
    assert_as_near(logits, reference, logits_of(theirs.double(), shape))
    back = to_huggingface(dict(model.named_parameters()), shape)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_a_written_config_is_read_back_unchanged(shape):
    config = config_of_shape(shape, torch.bfloat16, eod_id=7)
    assert shape_of_config(read_config(config, "config.json")) == shape
    theirs = transformers.GPT2Config(**config)
    assert theirs.dtype == torch.bfloat16
    assert theirs.eos_token_id == theirs.bos_token_id == 7
    assert theirs.resid_pdrop == theirs.embd_pdrop == theirs.attn_pdrop == 0
    for field in dataclasses.fields(GPT2Config):
        assert getattr(theirs, field.name) == config[field.name]


def test_missing_config_fields_get_transformers_defaults():
    defaults = GPT2Config("gpt2")
    theirs = transformers.GPT2Config()
    for field in dataclasses.fields(GPT2Config):
        assert getattr(defaults, field.name) == getattr(theirs, field.name), field.name
    assert shape_of_config(defaults) == ModelShape(
        ModelSize(12, 12, 768, 3072), 50_257, 1024, "gelu_tanh"
    )


UNSUPPORTED = {
    "model_type": "llama",
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-6,
    "scale_attn_by_inverse_layer_idx": True,
    "tie_word_embeddings": False,
    "n_embd": "wide",
    "n_head": 5,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_an_unsupported_config_is_rejected_by_its_field(field):
    with pytest.raises(UserError, match=f"^there/config.json: field {field} "):
        read_config({**CONFIG, field: UNSUPPORTED[field]}, "there/config.json")


@pytest.fixture
def tensors():
    return theirs_of(SHAPE).state_dict()


def test_tensors_of_older_folders_are_accepted(tensors):
    """Older folders have names without a prefix, causal masks, and no tied output layer."""
    expected = checked_tensors(tensors, SHAPE, "there")
    del tensors["lm_head.weight"]
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 20, 20).tril()
    plain["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    found = checked_tensors(plain, SHAPE, "there")
    assert found.keys() == expected.keys() == dict(huggingface_tensors(SHAPE).values()).keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("transformer.ln_f.bias", None),
        ("transformer.h.2.ln_1.bias", torch.ones(32)),
        ("transformer.h.0.mlp.c_fc.weight", torch.ones(128, 32)),
        ("transformer.h.1.ln_2.weight", torch.full((32,), torch.nan)),
        ("h.1.ln_2.weight", torch.ones(32)),  # duplicate tensor: with and without the prefix
        ("lm_head.weight", torch.ones(101, 32)),
    ],
)
def test_wrong_tensors_are_rejected_by_name(tensors, name, change):
    changed = {**tensors, name: change}
    if change is None:
        del changed[name]
    with pytest.raises(UserError, match=name.removeprefix("transformer.")):
        checked_tensors(changed, SHAPE, "there")
