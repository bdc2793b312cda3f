"""Convert checkpoints to Hugging Face folders, and from Hugging Face and Megatron-LM."""

from __future__ import annotations

from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    FromMegatronOptions,
    ToHuggingFaceOptions,
)
from megatron_chameleon.cli import Subcommands, Tool


def to_huggingface(options: ToHuggingFaceOptions) -> None:
    """Convert a checkpoint to a Hugging Face folder."""
    from megatron_chameleon.checkpoint.convert import convert_to_huggingface

    convert_to_huggingface(options)


def from_huggingface(options: FromHuggingFaceOptions) -> None:
    """Convert a Hugging Face folder to a checkpoint."""
    from megatron_chameleon.checkpoint.convert import convert_to_checkpoint

    convert_to_checkpoint(options)


def from_megatron(options: FromMegatronOptions) -> None:
    """Convert a Megatron-LM checkpoint to a checkpoint."""
    from megatron_chameleon.checkpoint.convert import convert_to_checkpoint

    convert_to_checkpoint(options)


COMMAND = Subcommands(
    {
        "to-huggingface": Tool(to_huggingface, ToHuggingFaceOptions),
        "from-huggingface": Tool(from_huggingface, FromHuggingFaceOptions),
        "from-megatron": Tool(from_megatron, FromMegatronOptions),
    }
)
