"""Options of tools/train_tokenizer.py, and how any tool encodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.ranges import Count
from megatron_chameleon.options.source import SourceOptions

EncoderChoice = Literal["auto", "own", "gigatoken"]


@dataclasses.dataclass(frozen=True)
class TrainTokenizerOptions:
    """Train a tokenizer on text. The same text and options give the same file."""

    source: SourceOptions
    output: Path
    """The file to write: NAME.json trains byte-level BPE (tokenizers), NAME.model trains
    SentencePiece BPE with byte fallback."""
    vocab_size: Count = 8192
    """Entries of the vocabulary, the end-of-document token included."""
    eod_token: str = "<|endoftext|>"
    """The end-of-document token to put into the vocabulary."""
    overwrite: bool = False
    """Replace the output file if there is one."""


@dataclasses.dataclass(frozen=True)
class EncoderOptions:
    """How text is encoded. For tools that encode; they embed it as it is."""

    tiktoken_pattern: str | None = None
    """How a tiktoken file splits text into words, which the file does not say: gpt2, cl100k_base,
    o200k_base, llama3 or a regular expression. Not needed for the files that these names come
    from."""
    encoder: EncoderChoice = "auto"
    """The library that encodes. The tokens are the same: 'auto' takes gigatoken, which is many
    times faster, where it gives the same ids as the tokenizer's own library on a sample of the
    text, 'own' always takes the tokenizer's own library, and 'gigatoken' nothing else."""


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
