#!/usr/bin/env python3
"""Train a byte-level BPE or SentencePiece tokenizer."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.options import TrainTokenizerOptions


def main(options: TrainTokenizerOptions) -> None:
    """Train a tokenizer and write its file."""
    from megatron_chameleon.corpus.train_tokenizer import train_tokenizer

    train_tokenizer(options)


if __name__ == "__main__":
    run_tool(main, TrainTokenizerOptions)
