"""Options that select a model: a preset or config.json, and Megatron's flags that change it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import (
    MUP_RELEASE,
    PRESETS,
    Activation,
    ModelConfig,
    Normalization,
    PositionEmbedding,
    preset,
)
from megatron_chameleon.parallel.releases import require_release
from megatron_chameleon.ranges import CheckedOptions, Count, Positive, PositiveShare, flag_of

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag that can only be switched on, as in Megatron-LM."""


@dataclasses.dataclass(frozen=True)
class ArchitectureOptions(CheckedOptions):
    """Changes to the model that --model names. The flags are Megatron's."""

    num_layers: Count | None = None
    """Number of transformer layers."""
    hidden_size: Count | None = None
    """Width of the hidden states."""
    ffn_hidden_size: Count | None = None
    """Width of the MLP. Default with --hidden-size, or if the MLP changes between GELU and SwiGLU,
    as in Megatron: 4 x hidden size; with SwiGLU, 8/3 x hidden size rounded down to a multiple of
    64."""
    num_attention_heads: Count | None = None
    """Number of query heads; unless --num-query-groups is passed, as many heads of keys and
    values."""
    num_query_groups: Count | None = None
    """Number of heads of keys and values (grouped-query attention)."""
    kv_channels: Count | None = None
    """Width of a head; default: --hidden-size / --num-attention-heads if one of them is passed."""
    position_embedding_type: PositionEmbedding | None = None
    """A learned table of positions, or rotary positions, which accept sequences of any length."""
    rotary_base: Positive | None = None
    """Base of the rotary frequencies; needs rotary positions."""
    rotary_percent: PositiveShare | None = None
    """Fraction of each head that is rotated; needs rotary positions."""
    normalization: Normalization | None = None
    """Type of all norms."""
    norm_epsilon: Positive | None = None
    """Number added to the variance in every norm."""
    swiglu: Switch = False
    """Use SwiGLU in the MLP."""
    openai_gelu: Switch = False
    """Use the tanh approximation of GELU in the MLP, as OpenAI's GPT-2 (gelu_new of Hugging
    Face)."""
    qk_layernorm: Switch = False
    """Normalize the queries and keys of each head."""
    untie_embeddings_and_output_weights: Switch = False
    """Use a separate matrix for the output layer."""
    add_qkv_bias: Switch = False
    """Add biases to queries, keys and values."""
    disable_bias_linear: Switch = False
    """Use no biases in linear layers, except those of --add-qkv-bias."""
    use_mup: Switch = False
    """Scale initial weights, logits and learning rates by the width (maximal update
    parametrization), so that the --lr of a small model also fits wider ones. Needs megatron-core
    0.19."""
    mup_base_hidden_size: Count | None = None
    """Width at which --use-mup scales nothing. Default: 768, that of the paper's proxies; in
    Megatron-LM, the model's own width."""
    mup_base_head_dim: Count | None = None
    """Width of a head at which --use-mup does not scale attention. Default: 64; in Megatron-LM,
    1."""

    def apply(self, config: ModelConfig) -> ModelConfig:
        """Return ``config`` with these changes.

        Raises:
            UserError: if the changes contradict each other or have no effect.
        """
        passed = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value not in (None, False)
        }
        if not passed:
            return config
        changes: dict[str, Any] = dict(passed)
        # Widths that follow from the changed ones, unless they are passed.
        if {"hidden_size", "num_attention_heads"} & passed.keys():
            changes.setdefault("kv_channels", 0)
        if "num_attention_heads" in passed:
            changes.setdefault("num_query_groups", 0)
        if changes.pop("openai_gelu", False):
            self.reject_changed(["swiglu"], "contradicts --openai-gelu")
            changes["activation"] = "gelu_tanh"
        if changes.pop("swiglu", False):
            changes["activation"] = "swiglu"
        activation: Activation = changes.get("activation", config.activation)
        is_gated = activation == "swiglu"
        if "hidden_size" in passed or is_gated != (config.activation == "swiglu"):
            hidden_size = passed.get("hidden_size", config.hidden_size)
            changes.setdefault("ffn_hidden_size", default_ffn_hidden_size(hidden_size, activation))
        if changes.pop("disable_bias_linear", False) and config.add_bias_linear:
            changes["add_bias_linear"] = False
            changes.setdefault("add_qkv_bias", False)
        if "norm_epsilon" in changes:
            changes["layernorm_epsilon"] = changes.pop("norm_epsilon")
        if passed.get("position_embedding_type") == "learned_absolute":
            changes |= _NOT_ROTARY
        try:
            changed = dataclasses.replace(config, **changes)
        except ValueError as error:
            message = str(error)
            for field in dataclasses.fields(self):
                message = message.replace(field.name, flag_of(field.name))
            raise UserError(f"{message}; pass other values of these flags") from error
        if changed.use_mup:
            require_release("--use-mup", MUP_RELEASE)
        else:
            self.reject_changed(("mup_base_hidden_size", "mup_base_head_dim"), "needs --use-mup")
        if not changed.is_rotary:
            self.reject_changed(
                ("rotary_base", "rotary_percent"), "needs --position-embedding-type rope"
            )
        return changed


_NOT_ROTARY = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name in ("rotary_base", "rotary_percent", "rope_scaling")
}


def default_ffn_hidden_size(hidden_size: int, activation: Activation) -> int:
    """Return the width of the MLP that Megatron-LM chooses if --ffn-hidden-size is not passed.

    With SwiGLU, whose MLP has three matrices instead of two, the number of parameters is about that
    of a GELU of 4 x ``hidden_size`` (Shazeer 2020, "GLU Variants Improve Transformer", section 3).
    """
    if activation != "swiglu":
        return 4 * hidden_size
    return int((4 * hidden_size * 2 / 3) / 64) * 64


def resolve_model(
    model: str, changes: ArchitectureOptions, vocab_size: int, max_sequence_length: int
) -> ModelConfig:
    """Return the model that ``--model`` and the flags of its architecture describe.

    Args:
        model: name of a preset, or a folder with the config.json of a Hugging Face model. A name
            means the preset, even if the current folder has a subfolder of this name.
        changes: flags that change this model.
        vocab_size: number of tokens of the tokenizer.
        max_sequence_length: number of tokens of a training sequence.

    Raises:
        UserError: for an unknown name, an unsupported config.json, or invalid changes.
    """
    path = Path(model)
    if model not in PRESETS and (path.is_dir() or path.name == "config.json"):
        from megatron_chameleon.model.huggingface_config import read_model_config

        config = dataclasses.replace(
            read_model_config(path).config,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
        )
    else:
        config = preset(model, vocab_size, max_sequence_length)
    return changes.apply(config)
