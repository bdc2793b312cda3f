#!/usr/bin/env python3
"""Turn text into a corpus of Megatron .bin/.idx files."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.preprocess import PreprocessOptions


def main(options: PreprocessOptions) -> None:
    """Read, split, tokenise and write."""
    from megatron_chameleon.corpus.preprocess import preprocess_data

    preprocess_data(options)


if __name__ == "__main__":
    run_tool(main, PreprocessOptions)
