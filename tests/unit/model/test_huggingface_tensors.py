"""Conversion of weights and settings to transformers' models and back."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import INIT_STD, ModelConfig
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.huggingface_config import GPT2Config, config_fields, parse_config
from megatron_chameleon.model.huggingface_tensors import (
    checked_tensors,
    huggingface_tensors,
    load_huggingface,
    to_huggingface,
)
from tests.families import FAMILIES, LENGTH, VARIANTS, llama, small
from tests.rounding import assert_as_near

GPT2, LLAMA = FAMILIES["gpt2"], FAMILIES["llama"]


def theirs_of(config):
    """Make transformers' model, with biases and norms that are also random."""
    fields = config_fields(config, "float32", eod_id=0)
    model_type = fields.pop("model_type")
    settings = transformers.AutoConfig.for_model(model_type, **fields)
    return with_random_weights(transformers.AutoModelForCausalLM.from_config(settings).eval())


def with_random_weights(model, std=0.2):
    """Overwrite every parameter with random values; norms are near 1."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sampled = std * torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(1 + sampled if is_norm else sampled)
    return model


def lengths_of(config):
    """Lengths of sequences; with rotary positions, also longer ones than in the training."""
    return (LENGTH, 300) if config.is_rotary else (LENGTH,)


def parts_of(config):
    """Return name -> shape of every Hugging Face tensor."""
    return dict(part for parts in huggingface_tensors(config).values() for part in parts)


def logits_of(model, config, length):
    """Return the logits [b, s, v] of random tokens at all positions."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (3, length), generator=generator)
    with torch.no_grad():
        if isinstance(model, transformers.PreTrainedModel):
            return model(tokens).logits
        positions = torch.arange(length).expand_as(tokens)
        return model(tokens, positions, None)[..., : config.vocab_size]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers_and_weights_convert_back(one_rank, name):
    config = VARIANTS[name]
    theirs = theirs_of(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert parts_of(config) == shapes
    assert config.num_parameters == sum(p.numel() for p in theirs.parameters())
    tensors = checked_tensors(theirs.state_dict(), config, "there")
    model = build_model(config, one_rank, seed=0).eval()
    load_huggingface(model, tensors, config)
    exact = theirs_of(config).double()
    for length in lengths_of(config):
        logits, reference = logits_of(model, config, length), logits_of(theirs, config, length)
        assert reference.std() > 1
        # Our logits may have the same float32 error as the logits of transformers' model.
        assert_as_near(logits, reference, logits_of(exact, config, length))
    back = to_huggingface(dict(model.named_parameters()), config)
    assert back.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        assert torch.equal(back[tensor_name], tensor), tensor_name


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_initial_weights_differ_by_less_than_1e_5(one_rank, name):
    config = VARIANTS[name]
    theirs = with_random_weights(theirs_of(config), INIT_STD)
    model = build_model(config, one_rank, seed=0).eval()
    load_huggingface(model, checked_tensors(theirs.state_dict(), config, "there"), config)
    for length in lengths_of(config):
        logits, reference = logits_of(model, config, length), logits_of(theirs, config, length)
        assert reference.std() > 0.1
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-5)


def test_partial_rotation_equals_that_of_transformers_stablelm(one_rank):
    """No family that is converted here rotates heads partially."""
    config = llama(
        normalization="LayerNorm",
        rotary_percent=0.25,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=True,
    )
    settings = transformers.StableLmConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_percent,
        },
        use_qkv_bias=True,
    )
    theirs = with_random_weights(transformers.StableLmForCausalLM(settings).eval())
    model = build_model(config, one_rank, seed=0).eval()
    load_huggingface(model, theirs.state_dict(), config)
    logits, reference = logits_of(model, config, 300), logits_of(theirs, config, 300)
    assert_as_near(logits, reference, logits_of(theirs.double(), config, 300))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_written_config_is_read_back_unchanged(name):
    config = VARIANTS[name]
    fields = config_fields(config, "bfloat16", eod_id=7)
    assert parse_config(fields, "config.json").config == config
    theirs = transformers.AutoConfig.for_model(**fields)
    assert theirs.dtype == torch.bfloat16
    assert theirs.eos_token_id == theirs.bos_token_id == 7
    # transformers 5 writes rope_parameters where earlier releases write rope_theta and rope_scaling
    again = parse_config(theirs.to_dict(), "config.json")
    assert (again.config, again.dropout) == (config, 0)


def test_missing_config_fields_get_transformers_defaults():
    defaults, theirs = GPT2Config(), transformers.GPT2Config()
    for field in dataclasses.fields(GPT2Config):
        assert getattr(defaults, field.name) == getattr(theirs, field.name, None), field.name
    assert defaults.model_config() == ModelConfig(
        12, 12, 768, 3072, 50_257, 1024, activation="gelu_tanh"
    )
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        body = transformers.AutoConfig.for_model(model_type, sliding_window=None).to_dict()
        config = parse_config(body, "config.json").config
        assert config.kv_channels == body.get("head_dim", 128)
        assert config.num_query_groups == body["num_key_value_heads"]


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (GPT2, {"model_type": "bert"}, "field model_type"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "field scale_attn_by_inverse_layer_idx"),
        (GPT2, {"tie_word_embeddings": False}, "field tie_word_embeddings"),
        (GPT2, {"n_head": 5}, "n_embd 64 .* n_head 5"),
        (LLAMA, {"model_type": "qwen3_moe"}, "field model_type"),
        (LLAMA, {"hidden_act": "gelu"}, "field hidden_act"),
        (LLAMA, {"rms_norm_eps": math.inf}, "field rms_norm_eps"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "field rope_scaling"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "field partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "field quantization_config"),
        (LLAMA, {"model_type": "mistral", "sliding_window": 8}, "sliding_window 8"),
        (LLAMA, {"model_type": "qwen2", "use_sliding_window": True}, "field use_sliding_window"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, "field layer_types"),
        (LLAMA, {"head_dim": 5}, ".* head_dim 5"),
    ],
)
def test_an_unsupported_config_is_rejected_by_its_field(config, changes, field):
    body = {**config_fields(config, "float32", 0), **changes}
    with pytest.raises(UserError, match=f"^there/config.json: {field}"):
        parse_config(body, "there/config.json")


@pytest.mark.parametrize(
    "config", [llama(rotary_percent=0.5), llama(normalization="LayerNorm"), small(kv_channels=8)]
)
def test_a_model_of_no_hugging_face_family_is_not_written(config):
    with pytest.raises(UserError, match="no supported Hugging Face family"):
        config_fields(config, "float32", 0)


@pytest.fixture
def tensors():
    return theirs_of(GPT2).state_dict()


def test_tensors_of_older_folders_are_accepted(tensors):
    """Older folders have names without a prefix, causal masks, and no tied output layer."""
    expected = checked_tensors(tensors, GPT2, "there")
    del tensors["lm_head.weight"]
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 20, 20).tril()
    plain["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    found = checked_tensors(plain, GPT2, "there")
    assert found.keys() == expected.keys() == parts_of(GPT2).keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_stored_rotary_frequencies_of_older_folders_are_ignored():
    tensors = theirs_of(LLAMA).state_dict()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert checked_tensors(tensors, LLAMA, "there").keys() == parts_of(LLAMA).keys()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("transformer.ln_f.bias", None),
        ("transformer.h.4.ln_1.bias", torch.ones(64)),
        ("transformer.h.0.mlp.c_fc.weight", torch.ones(96, 64)),
        ("transformer.h.1.ln_2.weight", torch.full((64,), torch.nan)),
        ("transformer.h.1.ln_1.weight", torch.ones(64, dtype=torch.float8_e4m3fn)),
        ("h.1.ln_2.weight", torch.ones(64)),  # duplicate tensor: with and without the prefix
        ("lm_head.weight", torch.ones(250, 64)),
    ],
)
def test_wrong_tensors_are_rejected_by_name(tensors, name, change):
    changed = {**tensors, name: change}
    if change is None:
        del changed[name]
    with pytest.raises(UserError, match=name.removeprefix("transformer.")):
        checked_tensors(changed, GPT2, "there")
