"""Describe existing Megatron .bin/.idx files as a corpus, without copying them."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.corpus.options import ImportOptions


def main(options: ImportOptions) -> None:
    """Read the .idx files and samples of the tokens, and write corpus.json."""
    from megatron_chameleon.corpus.import_corpus import import_corpus

    import_corpus(options)


COMMAND = Tool(main, ImportOptions)
