"""Options of tools/preprocess_data.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.source import SourceOptions


@dataclasses.dataclass(frozen=True)
class PreprocessOptions:
    """Turn text into a corpus: Megatron .bin/.idx files per domain and split, and corpus.json."""

    source: SourceOptions
    output: Path
    """The corpus folder to write."""
    tokenizer_model: Path
    """A tokenizer.json, a SentencePiece .model, or a folder that holds one; it is copied."""
    domain_key: str | None = None
    """Key of the domain's name in each line (dots reach into nested objects), for inputs that
    are not given as NAME=PATH."""
    eod_token: str = "<|endoftext|>"
    """The tokenizer's end-of-document token, appended to every document."""
    split: str = "90,5,5"
    """Shares of train, valid and test documents, in any unit. The split of a document is a
    function of its text, so the same text never lands in two of them."""
    drop_duplicates: bool = True
    """Keep the first of the documents of a domain that have the very same text; with
    --no-drop-duplicates they are only counted."""
    min_tokens_per_split: int = 1
    """Refuse a domain with fewer tokens than this in train, valid or test."""
    overwrite: bool = False
    """Replace the corpus that the output folder already holds."""
