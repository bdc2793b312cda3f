"""Compare configs read from well-known models' config.json with transformers' reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megatron_chameleon.model.huggingface_config import parse_config
from megatron_chameleon.model.layers import inverse_frequencies


def decoder(
    model_type: str, vocab_size: int, hidden: int, ffn: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    """Return a config.json with the fields that every decoder has, and ``more``."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_act": "silu",
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **more,
    }


QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "max_window_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
}
PUBLIC: dict[str, dict[str, Any]] = {
    # Without rope_theta and num_key_value_heads, as in early conversions.
    "Llama-1-7b": decoder(
        *("llama", 32_000, 4096, 11_008, 32, 32), max_position_embeddings=2048, rms_norm_eps=1e-6
    ),
    "Llama-3.2-1B": decoder(
        *("llama", 128_256, 2048, 8192, 16, 32),
        attention_bias=False,
        head_dim=64,
        max_position_embeddings=131_072,
        mlp_bias=False,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    "linear scaling of transformers 4.31": decoder(
        *("llama", 32_000, 4096, 11_008, 32, 32),
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        rope_scaling={"factor": 8.0, "type": "linear"},
        tie_word_embeddings=False,
    ),
    # Without num_key_value_heads and sliding_window, whose defaults depend on the family.
    "Mistral with default groups": decoder(
        *("mistral", 32_000, 4096, 14_336, 32, 32), max_position_embeddings=4096
    ),
    "Qwen2.5-7B-Instruct with YaRN": decoder(
        *("qwen2", 152_064, 3584, 18_944, 28, 28),
        max_position_embeddings=32_768,
        max_window_layers=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        sliding_window=131_072,
        use_sliding_window=False,
        rope_scaling={
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
            "type": "yarn",
        },
        tie_word_embeddings=False,
    ),
    "Qwen3-0.6B": decoder(
        *("qwen3", 151_936, 1024, 3072, 28, 16), **QWEN3, tie_word_embeddings=True
    ),
    "Qwen3-8B of transformers 5 with YaRN": decoder(
        *("qwen3", 151_936, 4096, 12_288, 36, 32),
        **{name: value for name, value in QWEN3.items() if not name.startswith("rope")},
        layer_types=["full_attention"] * 36,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000,
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
        tie_word_embeddings=False,
    ),
    "GPT-2": {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50_257,
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_config_is_read_as_transformers_reads_it(name):
    body = PUBLIC[name]
    config = parse_config(body, name).config
    theirs = transformers.AutoConfig.for_model(**body)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert config.num_parameters == sum(each.numel() for each in model.parameters())
    assert config.max_sequence_length == theirs.max_position_embeddings
    assert config.num_attention_heads == theirs.num_attention_heads
    norms = [each for each in model.modules() if "Norm" in type(each).__name__]
    epsilons = {getattr(each, "variance_epsilon", None) or each.eps for each in norms}
    assert epsilons == {config.layernorm_epsilon}
    if config.is_rotary:
        attention = model.model.layers[0].self_attn
        assert config.kv_channels == attention.head_dim
        assert (
            config.num_query_groups * attention.num_key_value_groups == theirs.num_attention_heads
        )
        rotary = type(model.model.rotary_emb)(theirs)
        factor = config.rope_scaling.attention_factor if config.rope_scaling else 1
        assert factor == rotary.attention_scaling
        torch.testing.assert_close(inverse_frequencies(config), rotary.inv_freq, rtol=1e-6, atol=0)
