"""Small models of every family, shared by all tests; a new family or option is one row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.model.config import ModelConfig, RopeScaling
from megatron_chameleon.model.huggingface_config import CONFIG_NAME, config_fields

VOCAB_SIZE, LENGTH = 250, 32


def small(**changes: Any) -> ModelConfig:
    """Return a GPT-2 of four layers that two tensor-parallel ranks can share, with ``changes``."""
    base = ModelConfig(4, 4, 64, 96, vocab_size=VOCAB_SIZE, max_sequence_length=LENGTH)
    return dataclasses.replace(base, **changes)


def llama(**changes: Any) -> ModelConfig:
    """Return a small Llama with two query heads per group, with ``changes``."""
    settings: dict[str, Any] = {
        "num_query_groups": 2,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }
    return small(**{**settings, **changes})


FAMILIES: dict[str, ModelConfig] = {
    "gpt2": small(),
    "llama": llama(untie_embeddings_and_output_weights=True),
    "qwen2": llama(add_qkv_bias=True, layernorm_epsilon=1e-6, rotary_base=1e6),
    "qwen3": llama(qk_layernorm=True, kv_channels=24, layernorm_epsilon=1e-6, rotary_base=1e6),
}

# Hugging Face's families represent these options; "partial rotation" is Megatron's alone.
VARIANTS: dict[str, ModelConfig] = {
    **FAMILIES,
    "gpt2, tanh": small(activation="gelu_tanh", layernorm_epsilon=1e-6),
    "gpt2, head dimension 50": small(
        num_attention_heads=3, num_query_groups=3, hidden_size=150, kv_channels=50
    ),
    "llama, tied": llama(),
    "llama, no groups": llama(num_query_groups=4),
    "llama, one group": llama(num_query_groups=1),
    "llama, biases": llama(add_bias_linear=True, add_qkv_bias=True),
    "llama, wide heads": llama(kv_channels=40),
    "llama, linear scaling": llama(rope_scaling=RopeScaling("linear", 4.0)),
    "llama, llama3 scaling": llama(
        rotary_base=500.0, rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0)
    ),
    "llama, yarn scaling": llama(
        rope_scaling=RopeScaling("yarn", 4.0, 16, beta_fast=4.0, attention_factor=1.14)
    ),
    "qwen2, untied": llama(add_qkv_bias=True, untie_embeddings_and_output_weights=True),
    "qwen3, yarn scaling": llama(
        qk_layernorm=True,
        kv_channels=24,
        rope_scaling=RopeScaling("yarn", 2.0, 16, truncate=False, attention_factor=1.07),
    ),
}


def write_config(folder: Path, config: ModelConfig) -> Path:
    """Write the config.json of a model to a new folder, for ``--model``; return the folder."""
    folder.mkdir(parents=True)
    write_json(folder / CONFIG_NAME, config_fields(config, "float32", 0))
    return folder
