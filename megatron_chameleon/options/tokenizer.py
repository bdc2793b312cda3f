"""Options of tools/train_tokenizer.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.source import SourceOptions


@dataclasses.dataclass(frozen=True)
class TrainTokenizerOptions:
    """Train a tokenizer on text. The same text and options give the same file."""

    source: SourceOptions
    output: Path
    """The file to write: NAME.json trains byte-level BPE (tokenizers), NAME.model trains
    SentencePiece BPE with byte fallback."""
    vocab_size: int = 8192
    """Entries of the vocabulary, the end-of-document token included."""
    eod_token: str = "<|endoftext|>"
    """The end-of-document token to put into the vocabulary."""
    overwrite: bool = False
    """Replace the output file if there is one."""
