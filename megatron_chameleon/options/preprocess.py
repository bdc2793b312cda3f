"""Options of tools/preprocess_data.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.ranges import LargeCount, Processes
from megatron_chameleon.options.source import DomainOptions, SourceOptions
from megatron_chameleon.options.tokenizer import EncoderOptions


@dataclasses.dataclass(frozen=True)
class PreprocessOptions:
    """Turn text into a corpus: Megatron .bin/.idx files per domain and split, and corpus.json.

    The work is done in shards. A run that was killed is gone on with by the same command.
    """

    source: SourceOptions
    output: Path
    """The corpus folder to write. While it is made, finished shards lie in its folder .partial."""
    tokenizer_model: Path
    """A tokenizer.json, a vocab.json beside its merges.txt, a tiktoken file, a SentencePiece
    .model, or a folder that holds one of them; the corpus keeps a copy."""
    domains: DomainOptions = dataclasses.field(default_factory=DomainOptions)
    encoding: EncoderOptions = dataclasses.field(default_factory=EncoderOptions)
    eod_token: str = "<|endoftext|>"
    """The tokenizer's end-of-document token, appended to every document."""
    split: str = "90,5,5"
    """Shares of train, valid and test documents, in any unit. The split of a document is a
    function of its text, so the same text never lands in two of them. Sources that have splits of
    their own keep them, and what is in their valid or test is left out of train everywhere."""
    drop_duplicates: bool = True
    """Keep the first of the documents of a domain that have the very same text; with
    --no-drop-duplicates they are only counted."""
    min_tokens_per_split: int = 1
    """Refuse a domain with fewer tokens than this in train, valid or test."""
    overwrite: bool = False
    """Replace the corpus that the output folder already holds."""
    workers: Processes | None = None
    """Processes that work on shards at the same time, each with a tokenizer of its own; without
    it, one for each core but one. With 1, no other process is started."""
    shard_bytes: LargeCount = 256_000_000
    """Bytes of input, as they lie on disk, that make a shard: what is lost when a run is killed.
    Compressed files are not cut. The corpus does not depend on it."""
    shard: str | None = None
    """i/n: do every n-th shard from the i-th on, and stop. For n machines that share the output
    folder; the same command without it then joins what they have made."""
