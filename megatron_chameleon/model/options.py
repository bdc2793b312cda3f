"""Options that select a model: a preset or config.json, and Megatron's flags that change it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import (
    Activation,
    ModelConfig,
    Normalization,
    PositionEmbedding,
    preset,
)
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
    """Width of the MLP."""
    num_attention_heads: Count | None = None
    """Number of query heads; unless --num-query-groups is passed, as many heads of keys and
    values."""
    num_query_groups: Count | None = None
    """Number of heads of keys and values (grouped-query attention)."""
    kv_channels: Count | None = None
    """Width of a head; default: --hidden-size / --num-attention-heads if one of them is passed."""
    position_embedding_type: PositionEmbedding | None = None
    """A learned table of positions, or rotary positions."""
    rotary_base: Positive | None = None
    """Base of the rotary frequencies."""
    rotary_percent: PositiveShare | None = None
    """Fraction of each head that is rotated."""
    normalization: Normalization | None = None
    """Type of all norms."""
    norm_epsilon: Positive | None = None
    """Number added to the variance in every norm."""
    swiglu: Switch = False
    """Use SwiGLU in the MLP."""
    qk_layernorm: Switch = False
    """Normalize the queries and keys of each head."""
    untie_embeddings_and_output_weights: Switch = False
    """Use a separate matrix for the output layer."""
    add_qkv_bias: Switch = False
    """Add biases to queries, keys and values."""
    disable_bias_linear: Switch = False
    """Use no biases in linear layers, except those of --add-qkv-bias."""

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
        if {"hidden_size", "num_attention_heads"} & passed.keys():
            # These widths follow from the changed ones, unless they are passed.
            changes = {"kv_channels": 0, **changes}
        if "num_attention_heads" in passed:
            changes = {"num_query_groups": 0, **changes}
        if changes.pop("swiglu", False):
            swiglu: Activation = "swiglu"
            changes["activation"] = swiglu
        if changes.pop("disable_bias_linear", False):
            changes["add_bias_linear"] = False
            changes.setdefault("add_qkv_bias", False)
        if "norm_epsilon" in changes:
            changes["layernorm_epsilon"] = changes.pop("norm_epsilon")
        try:
            changed = dataclasses.replace(config, **changes)
        except ValueError as error:
            flags = ", ".join(f"{flag_of(name)} {value}" for name, value in passed.items())
            raise UserError(f"{flags}: {error}; change one of these flags") from error
        if not changed.is_rotary:
            self.reject_changed(
                ("rotary_base", "rotary_percent"), "needs --position-embedding-type rope"
            )
        return changed


def resolve_model(
    model: str, changes: ArchitectureOptions, vocab_size: int, max_sequence_length: int
) -> ModelConfig:
    """Return the model that ``--model`` and the flags of its architecture describe.

    Args:
        model: name of a preset, or a folder with the config.json of a Hugging Face model.
        changes: flags that change this model.
        vocab_size: number of tokens of the tokenizer.
        max_sequence_length: number of tokens of a training sequence.

    Raises:
        UserError: for an unknown name, an unsupported config.json, or invalid changes.
    """
    path = Path(model)
    if path.is_dir() or path.name == "config.json":
        from megatron_chameleon.model.huggingface_config import read_model_config

        config = dataclasses.replace(
            read_model_config(path).config,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
        )
    else:
        config = preset(model, vocab_size, max_sequence_length)
    return changes.apply(config)
