"""Turn text into a corpus of Megatron .bin/.idx files."""

from __future__ import annotations

import gc

from megatron_chameleon.cli import Tool
from megatron_chameleon.corpus.options import PreprocessOptions


def main(options: PreprocessOptions) -> None:
    """Read, split and tokenize text, and write the corpus."""
    from megatron_chameleon.corpus.preprocess import preprocess_data

    # Exclude the objects of imported modules, which never become garbage, from garbage collection:
    # scanning them repeatedly, and twice at exit, would take a tenth of a second in total.
    gc.freeze()
    preprocess_data(options)
    gc.freeze()


COMMAND = Tool(main, PreprocessOptions)
