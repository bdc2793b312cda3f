"""Convert a Hugging Face config.json to and from a ModelConfig: gpt2, llama, qwen2 and qwen3.

A Mistral model without a sliding window computes the same as a Llama model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from megatron_chameleon.artifacts.files import read_foreign_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import INIT_STD, Activation, ModelConfig, RopeScaling

CONFIG_NAME = "config.json"
Family = Literal["gpt2", "llama", "qwen2", "qwen3"]
ARCHITECTURES: dict[str, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# transformers' values of missing fields (a null has another meaning), where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
WholeHead = Annotated[float, Field(ge=1, le=1)]
"""Fraction of each head that is rotated. transformers' Llama cannot rotate a part of a head."""


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Fields of a GPT-2's config.json that determine what the model computes.

    Defaults are those of transformers' GPT2Config.
    """

    vocab_size: PositiveInt = 50_257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: Literal[
        "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
    ] = "gelu_new"
    resid_pdrop: NonNegativeFloat = 0.1
    embd_pdrop: NonNegativeFloat = 0.1
    attn_pdrop: NonNegativeFloat = 0.1
    layer_norm_epsilon: PositiveFloat = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True
    quantization_config: None = None

    @property
    def dropout(self) -> float:
        """Largest dropout rate."""
        return max(self.resid_pdrop, self.embd_pdrop, self.attn_pdrop)

    def model_config(self) -> ModelConfig:
        """Return the model. Raises ValueError for dimensions that contradict each other."""
        is_exact = self.activation_function in ("gelu", "gelu_python")
        activation: Activation = "gelu" if is_exact else "gelu_tanh"
        return ModelConfig(
            num_layers=self.n_layer,
            num_attention_heads=self.n_head,
            hidden_size=self.n_embd,
            ffn_hidden_size=self.n_inner or 4 * self.n_embd,
            vocab_size=self.vocab_size,
            max_sequence_length=self.n_positions,
            activation=activation,
            layernorm_epsilon=self.layer_norm_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """Field rope_scaling (transformers 4) or rope_parameters (transformers 5) of a config.json."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    truncate: bool = True
    attention_factor: PositiveFloat | None = None
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    partial_rotary_factor: WholeHead = 1.0

    def scaling(self, max_position_embeddings: int) -> RopeScaling | None:
        """Return the scaling of a model with this many positions."""
        if self.rope_type == "default":
            return None
        if self.rope_type == "linear":
            return RopeScaling("linear", self.factor)
        original = self.original_max_position_embeddings or max_position_embeddings
        if self.rope_type == "llama3":
            factors = self.low_freq_factor, self.high_freq_factor
            return RopeScaling("llama3", self.factor, original, *factors)
        attention = self.attention_factor
        if attention is None and self.mscale and self.mscale_all_dim:
            attention = self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return RopeScaling(
            "yarn",
            self.factor,
            original,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            truncate=self.truncate,
            attention_factor=self._sharpening(1.0) if attention is None else attention,
        )

    def _sharpening(self, scale: float) -> float:
        """Peng et al. 2023 (YaRN), equation 22."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields of a Llama, Mistral, Qwen2 or Qwen3 config.json that determine the model."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: WholeHead = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: NonNegativeFloat = 0.0
    use_sliding_window: Literal[False] = False
    sliding_window: PositiveInt | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    quantization_config: None = None

    @property
    def dropout(self) -> float:
        """Dropout rate of the attention."""
        return self.attention_dropout

    def model_config(self) -> ModelConfig:
        """Return the model. Raises ValueError for fields that contradict each other."""
        window = self.sliding_window if self.model_type == "mistral" else None
        if window is not None and window < self.max_position_embeddings:
            raise ValueError(f"sliding_window {window} is not supported")
        if self.attention_bias != self.mlp_bias:
            name = "attention_bias" if self.attention_bias else "mlp_bias"
            raise ValueError(f"{name} is supported only if both biases are true")
        rope = self.rope_parameters or self.rope_scaling or RopeParameters()
        return ModelConfig(
            num_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_position_embeddings,
            num_query_groups=self.num_key_value_heads or 0,
            kv_channels=self.head_dim or 0,
            activation="swiglu",
            normalization="RMSNorm",
            layernorm_epsilon=self.rms_norm_eps,
            position_embedding_type="rope",
            rotary_base=rope.rope_theta or self.rope_theta,
            rope_scaling=rope.scaling(self.max_position_embeddings),
            qk_layernorm=self.model_type == "qwen3",
            add_bias_linear=self.attention_bias,
            add_qkv_bias=self.model_type == "qwen2",
            untie_embeddings_and_output_weights=not self.tie_word_embeddings,
        )


# Fields of ModelConfig with other names in a config.json.
_OTHER_NAMES: dict[type, dict[str, str]] = {
    GPT2Config: {"hidden_size": "n_embd", "num_attention_heads": "n_head"},
    DecoderConfig: {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"},
}


@dataclasses.dataclass(frozen=True)
class FoundConfig:
    """The model that a config.json describes.

    Attributes:
        config: the model.
        dropout: largest dropout rate of the config.json, which models here do not use.
    """

    config: ModelConfig
    dropout: float


def read_model_config(path: Path) -> FoundConfig:
    """Read the model that a config.json, or the config.json in a folder, describes.

    Raises:
        UserError: if the file is missing or damaged, or if a field is not supported; the message
            names the first such field.
    """
    where = path if path.name == CONFIG_NAME else path / CONFIG_NAME
    return parse_config(read_foreign_json(where, "pass a Hugging Face model's folder"), str(where))


def parse_config(body: Mapping[str, Any], where: str) -> FoundConfig:
    """Parse ``body``, the contents of the config.json at ``where``; raises UserError as above."""
    family, decoders = body.get("model_type"), ("llama", "mistral", "qwen2", "qwen3")
    if family not in ("gpt2", *decoders):
        reason = f"must be gpt2, {', '.join(decoders)}"
        raise _unsupported(where, "model_type", family, reason)
    fields = {**_DEFAULTS.get(family, {}), **body}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(fields.get(name), dict) and "type" in fields[name]:  # transformers < 4.45
            fields[name] = {"rope_type": fields[name]["type"], **fields[name]}
    kind: Any = GPT2Config if family == "gpt2" else DecoderConfig
    try:
        found = TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "(the whole file)"
        raise _unsupported(where, field, fields.get(field), first["msg"]) from error
    try:
        return FoundConfig(found.model_config(), found.dropout)
    except ValueError as error:
        message = str(error)
        for ours, theirs in _OTHER_NAMES[kind].items():
            message = message.replace(ours, theirs)
        raise UserError(f"{where}: {message}; this model is not supported, use another") from error


def family_of(config: ModelConfig) -> Family | None:
    """Return the Hugging Face family that can represent ``config``; None if none can."""
    if not config.is_rotary:
        as_gpt2 = ModelConfig(
            config.num_layers,
            config.num_attention_heads,
            config.hidden_size,
            config.ffn_hidden_size,
            config.vocab_size,
            config.max_sequence_length,
            kv_channels=config.hidden_size // config.num_attention_heads,
            activation="gelu_tanh" if config.activation == "gelu_tanh" else "gelu",
            layernorm_epsilon=config.layernorm_epsilon,
        )
        return "gpt2" if config == as_gpt2 else None
    is_llama = (
        config.activation == "swiglu"
        and config.normalization == "RMSNorm"
        and config.rotary_percent == 1
        and not config.use_mup
    )
    qkv_bias_only = config.add_qkv_bias and not config.add_bias_linear
    if not is_llama or (config.qk_layernorm and config.add_qkv_bias):
        return None
    if config.qk_layernorm:
        return "qwen3"
    return "qwen2" if qkv_bias_only else "llama"


def config_fields(config: ModelConfig, dtype: str, eod_id: int) -> dict[str, Any]:
    """Return the contents of a model's config.json.

    Args:
        config: the model.
        dtype: name of the dtype of the weights, such as "float32".
        eod_id: id of the end-of-document token, which becomes the bos and eos token.

    Raises:
        UserError: if no Hugging Face family here can represent the model.
    """
    family = family_of(config)
    if family is None:
        raise UserError(
            "no supported Hugging Face family (gpt2, llama, qwen2, qwen3) can represent this "
            f"model: {describe(config)}; keep it as a checkpoint"
        )
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "initializer_range": INIT_STD,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        # Later releases of transformers write "dtype", but still read "torch_dtype".
        "torch_dtype": dtype,
    }
    if family == "gpt2":
        return fields | {
            "n_positions": config.max_sequence_length,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_hidden_size,
            "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "layer_norm_epsilon": config.layernorm_epsilon,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        }
    scaling = config.rope_scaling
    rope: dict[str, Any] | None = None
    if scaling:
        used = {
            "linear": ("factor",),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                "beta_fast",
                "beta_slow",
                "truncate",
                "attention_factor",
                "original_max_position_embeddings",
            ),
        }[scaling.type]
        rope = {"rope_type": scaling.type, "factor": scaling.factor}
        rope |= {name: getattr(scaling, name) for name in used}
    fields |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
    }
    if family != "qwen2":
        fields["attention_bias"] = config.add_bias_linear
    if family == "llama":
        fields["mlp_bias"] = config.add_bias_linear
    else:
        fields["use_sliding_window"] = False
    return fields


def describe(config: ModelConfig) -> str:
    """Describe the model in one line."""
    family = {"gpt2": "GPT-2", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}.get(
        family_of(config) or "", f"GPT ({config.normalization}, {config.activation})"
    )
    positions = "rotary" if config.is_rotary else str(config.max_sequence_length)
    mup = f", muP of base width {config.mup_base_hidden_size}" if config.use_mup else ""
    return (
        f"{family} of {config.num_layers} layers, {config.num_parameters:,} parameters, "
        f"vocabulary {config.vocab_size}, {positions} positions{mup}"
    )


def _unsupported(where: str, field: str, value: object, reason: str) -> UserError:
    return UserError(
        f"{where}: field {field} {value!r}: {reason}; this model is not supported, use another"
    )
