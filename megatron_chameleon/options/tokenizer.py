"""The tokenizer of a checkpoint, for tools that read text with a trained model."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Which tokenizer, where the one that the checkpoint was made with is not to be found."""

    tokenizer_model: Path | None = None
    """The tokenizer that the model was trained with, or a corpus that was made with it; what the
    checkpoint was trained on or converted from, unless given."""
    tiktoken_pattern: str | None = None
    """How a tiktoken file splits text into words; as the checkpoint was made with, unless given. A
    corpus knows its own."""
    eod_token: str | None = None
    """The tokenizer's end-of-document token; the one that the checkpoint was made with, or else
    <|endoftext|>, unless given. A corpus knows its own."""
