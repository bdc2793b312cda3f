"""Options of tools/convert_checkpoint.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

WeightsDtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class ToHuggingFaceOptions:
    """Write a checkpoint, of whatever layout, as a Hugging Face GPT-2 folder."""

    checkpoint: Path
    """A run folder (its latest checkpoint) or one checkpoint folder."""
    output: Path
    """The folder to write: config.json, weights in safetensors, and the tokenizer."""
    dtype: WeightsDtype = "float32"
    """Data type of the weights; only float32 keeps them as they are."""
    max_shard_size: str = "5GB"
    """Weights of more than this are cut into several files."""
    tokenizer_model: Path | None = None
    """The tokenizer that the model was trained with, or a corpus that was made with it; what the
    checkpoint was trained on or converted from, unless given."""
    tiktoken_pattern: str | None = None
    """How a tiktoken file splits text into words, as in tools/preprocess_data.py; as the checkpoint
    was made with, unless given. A corpus knows its own."""
    eod_token: str | None = None
    """The tokenizer's end-of-document token; the one that the checkpoint was made with, or else
    <|endoftext|>, unless given. A corpus knows its own."""
    overwrite: bool = False
    """Replace the model that the output folder already holds."""


@dataclasses.dataclass(frozen=True)
class FromHuggingFaceOptions:
    """Write a Hugging Face GPT-2 folder as a checkpoint of step 0, for any layout to read."""

    model: Path
    """The folder: config.json, weights in safetensors, and the tokenizer."""
    output: Path
    """The checkpoint folder to write."""
    tokenizer_model: Path | None = None
    """The tokenizer of the model; the one in the folder unless given. A corpus has to be made with
    it to be used with the checkpoint."""
    tiktoken_pattern: str | None = None
    """How a tiktoken file given as --tokenizer-model splits text into words, as in
    tools/preprocess_data.py."""
    eod_token: str = "<|endoftext|>"
    """The tokenizer's end-of-document token."""
    allow_pickle: bool = False
    """Read weights in torch's own format (pytorch_model.bin) where there is no safetensors file.
    Tensors alone are read of it; code in it is refused."""
    overwrite: bool = False
    """Replace the checkpoint that the output folder already holds."""
