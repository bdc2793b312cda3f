#!/usr/bin/env python3
"""Turn text into a corpus of Megatron .bin/.idx files."""

from __future__ import annotations

import gc

from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.options import PreprocessOptions


def main(options: PreprocessOptions) -> None:
    """Read, split, tokenise and write."""
    from megatron_chameleon.corpus.preprocess import preprocess_data

    # What the libraries are made of stays to the end: to look it through for cycles again and
    # again, and twice when the interpreter leaves, takes a tenth of a second.
    gc.freeze()
    preprocess_data(options)
    gc.freeze()


if __name__ == "__main__":
    run_tool(main, PreprocessOptions)
