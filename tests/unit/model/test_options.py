"""Test the flags that select and change a model, against Megatron-LM's rules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import PRESETS, ModelConfig, RopeScaling, name_of, preset
from megatron_chameleon.model.huggingface_config import config_fields
from megatron_chameleon.model.options import (
    ArchitectureOptions,
    default_ffn_hidden_size,
    resolve_model,
)
from tests.families import VARIANTS, llama, small, write_config

LLAMA_FLAGS = (
    "--num-query-groups 2 --swiglu --ffn-hidden-size 96 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear"
)


def changed(flags: str, config: ModelConfig) -> ModelConfig:
    return parse_options(ArchitectureOptions, flags.split()).apply(config)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--hidden-size 32", {"hidden_size": 32, "ffn_hidden_size": 128, "kv_channels": 8}),
        (
            "--num-attention-heads 8",
            {"num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 8},
        ),
        (
            "--normalization RMSNorm --norm-epsilon 1e-6",
            {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6},
        ),
        ("--swiglu", {"activation": "swiglu", "ffn_hidden_size": 128}),
        ("--swiglu --ffn-hidden-size 100", {"activation": "swiglu", "ffn_hidden_size": 100}),
        ("--openai-gelu", {"activation": "gelu_tanh"}),
        ("--disable-bias-linear", {"add_bias_linear": False, "add_qkv_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"add_bias_linear": False, "add_qkv_bias": True}),
        (
            "--position-embedding-type rope --rotary-base 5e5 --rotary-percent 0.5",
            {"position_embedding_type": "rope", "rotary_base": 5e5, "rotary_percent": 0.5},
        ),
    ],
)
def test_a_flag_changes_its_field_and_the_widths_that_follow(flags, expected):
    assert changed(flags, small()) == dataclasses.replace(small(), **expected)


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("", llama()),
        ("--add-qkv-bias --rotary-base 1e6", llama(add_qkv_bias=True, rotary_base=1e6)),
        ("--qk-layernorm --kv-channels 24", llama(qk_layernorm=True, kv_channels=24)),
    ],
)
def test_megatrons_flags_turn_a_gpt2_into_each_family(flags, config):
    assert changed(f"{LLAMA_FLAGS} {flags}", small()) == config


@given(st.integers(1, 2**20))
def test_the_default_mlp_is_megatrons(hidden_size):
    """megatron.training.arguments: 4 h, or with SwiGLU int((4 h x 2/3) / 64) x 64."""
    assert default_ffn_hidden_size(hidden_size, "gelu") == 4 * hidden_size
    width = default_ffn_hidden_size(hidden_size, "swiglu")
    assert width % 64 == 0
    assert 0 <= 8 * hidden_size - 3 * width < 3 * 64


def test_flags_that_a_model_already_has_change_nothing():
    qwen2 = llama(add_qkv_bias=True)
    assert changed("--swiglu --disable-bias-linear --position-embedding-type rope", qwen2) == qwen2


def test_openai_gelu_keeps_the_width_of_an_mlp_that_is_not_gated():
    narrow = small(ffn_hidden_size=100)
    expected = dataclasses.replace(narrow, activation="gelu_tanh")
    assert changed("--openai-gelu", narrow) == expected
    assert config_fields(expected, "float32", 0)["activation_function"] == "gelu_new"
    assert changed("--openai-gelu", llama()).ffn_hidden_size == 4 * llama().hidden_size


def test_learned_positions_drop_the_rotary_settings():
    rotary = small(
        position_embedding_type="rope", rotary_base=1e6, rope_scaling=RopeScaling("linear", 4.0)
    )
    assert changed("--position-embedding-type learned_absolute", rotary) == small()


@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        ("--num-attention-heads 7", small(), "--hidden-size 64 .*--num-attention-heads 7"),
        ("--num-query-groups 3", small(), "--num-attention-heads 4 .*--num-query-groups 3"),
        ("--swiglu --openai-gelu", small(), "--swiglu.*--openai-gelu"),
        ("--rotary-percent 0.2", llama(), "--rotary-percent 0.2 of --kv-channels 16"),
        ("--rotary-percent 0.1", llama(), "--rotary-percent 0.1"),
        ("--mup-base-hidden-size 64", small(), "--mup-base-hidden-size .* --use-mup"),
        ("--rotary-base 5e5", small(), "--rotary-base .* --position-embedding-type rope"),
        (
            "--position-embedding-type learned_absolute --rotary-base 5e5",
            llama(),
            "--rotary-base .* --position-embedding-type rope",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_named(flags, config, named):
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        changed(flags, config)


def test_a_preset_has_its_name_and_the_sizes_of_the_run():
    for name in PRESETS:
        config = resolve_model(name, ArchitectureOptions(), 1000, 64)
        assert config == preset(name, 1000, 64)
        assert (config.vocab_size, config.max_sequence_length) == (1000, 64)
        assert name_of(config) == name
        assert name_of(ArchitectureOptions(num_layers=99).apply(config)) is None


@pytest.mark.parametrize("name", ["gpt2", "qwen3, yarn scaling"])
def test_a_folder_gives_its_model_with_the_sizes_of_the_run(name, tmp_path):
    folder = write_config(tmp_path / "model", VARIANTS[name])
    expected = dataclasses.replace(VARIANTS[name], vocab_size=77, max_sequence_length=19)
    for path in (folder, folder / "config.json"):
        assert resolve_model(str(path), ArchitectureOptions(), 77, 19) == expected
    deeper = resolve_model(str(folder), ArchitectureOptions(num_layers=6), 77, 19)
    assert deeper == dataclasses.replace(expected, num_layers=6)


def test_a_folder_without_a_supported_model_is_an_error(tmp_path):
    for content, named in ((None, "config.json does not exist"), ("{}", "field model_type None")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=named):
            resolve_model(str(tmp_path), ArchitectureOptions(), 100, 16)


def test_a_folder_does_not_hide_the_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()
    assert resolve_model("nano", ArchitectureOptions(), 100, 16) == preset("nano", 100, 16)


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(UserError, match=r"--model llama-2b: .*llama-130m.*qwen3"):
        resolve_model("llama-2b", ArchitectureOptions(), 100, 16)
