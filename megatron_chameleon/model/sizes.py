"""Model sizes: the paper's sizes, and small sizes for tests and CPUs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.artifacts.record import Positive
from megatron_chameleon.errors import UserError

Activation = Literal["gelu", "gelu_tanh"]
"""Activation of the MLP: exact GELU (Hendrycks and Gimpel 2016), or its tanh approximation, which
the public GPT-2 uses."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Dimensions of a GPT: learned positions, tied embeddings, GELU, LayerNorm with biases."""

    num_layers: Positive
    num_attention_heads: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive

    def __post_init__(self) -> None:
        assert self.hidden_size % self.num_attention_heads == 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


DEFAULT_SIZE = "82m"
SIZES: dict[str, ModelSize] = {
    # Chameleon (ICML 2025), appendix, table of architectures.
    "60m": ModelSize(3, 6, 768, 3072),
    "82m": ModelSize(6, 12, 768, 3072),
    "124m": ModelSize(12, 12, 768, 3072),
    "210m": ModelSize(24, 16, 768, 3072),
    "684m": ModelSize(36, 24, 1200, 4800),
    "1.2b": ModelSize(36, 25, 1600, 6400),
    # RegMix (ICLR 2025): the smallest proxy, with 1M parameters without embeddings.
    "1m": ModelSize(2, 8, 256, 512),
    # Sizes that are not from a paper, for tests and for the quickstart on two CPU cores.
    "nano": ModelSize(4, 4, 64, 256),
    "tiny": ModelSize(4, 4, 128, 512),
    "mini": ModelSize(6, 8, 256, 1024),
}


def model_size(name: str) -> ModelSize:
    """Look up a size.

    Raises:
        UserError: for an unknown name; the message lists the known names.
    """
    try:
        return SIZES[name]
    except KeyError:
        raise UserError(
            f"--model-size {name}: unknown size; choose from {', '.join(SIZES)}"
        ) from None


def name_of(size: ModelSize) -> str | None:
    """Return the name of ``size``; None if it has no name."""
    return next((name for name, named in SIZES.items() if named == size), None)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Model size, vocabulary and sequence length, which determine the shape of every tensor.

    ``vocab_size`` is the size of the tokenizer's vocabulary, without padding. Models trained here
    have exact GELU as ``activation``.
    """

    size: ModelSize
    vocab_size: Positive
    max_sequence_length: Positive
    activation: Activation = "gelu"

    def require_bytes(self, num_bytes: int, where: str) -> None:
        """Check that files of ``num_bytes`` can hold the model, before its memory is allocated.

        Raises:
            UserError: for less than 2 bytes per parameter; the message names ``where``.
        """
        if 2 * self.num_parameters > num_bytes:
            raise UserError(
                f"{where}: {self.num_parameters:,} parameters do not fit into the {num_bytes:,} "
                "bytes of its files, so it is damaged; use another copy"
            )

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer: four projections, biases and two layer norms."""
        h, f = self.size.hidden_size, self.size.ffn_hidden_size
        attention = 4 * h * h + 4 * h
        mlp = 2 * h * f + f + h
        return attention + mlp + 4 * h

    @property
    def num_parameters(self) -> int:
        """Total number of parameters, with the tied embedding counted once and without padding."""
        h = self.size.hidden_size
        embeddings = (self.vocab_size + self.max_sequence_length) * h
        return embeddings + self.size.num_layers * self.layer_parameters + 2 * h
