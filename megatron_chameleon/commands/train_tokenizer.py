"""Train a byte-level BPE or SentencePiece tokenizer."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.corpus.options import TrainTokenizerOptions


def main(options: TrainTokenizerOptions) -> None:
    """Train a tokenizer and write its file."""
    from megatron_chameleon.corpus.train_tokenizer import train_tokenizer

    train_tokenizer(options)


COMMAND = Tool(main, TrainTokenizerOptions)
