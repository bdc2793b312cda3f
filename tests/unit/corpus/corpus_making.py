"""Make corpora and read their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import SPLITS, Corpus, Split
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer


def source_options(*inputs: object, **options: Any) -> SourceOptions:
    """Return SourceOptions with these values of ``--input``."""
    return SourceOptions((tuple(str(path) for path in inputs),), **options)


def make_corpus(options: PreprocessOptions) -> Corpus:
    """Make the corpus of ``options``, and load it."""
    preprocess_data(options)
    return Corpus.load(options.output)


def documents_of(corpus: Corpus, name: str, split: Split) -> list[str]:
    """Decode the texts of a split from its files."""
    tokenizer = corpus_tokenizer(corpus)
    file = open_domains(corpus).open(name, split)
    documents = np.split(file.tokens, np.cumsum(file.lengths)[:-1])
    assert all(document[-1] == corpus.tokenizer.eod_id for document in documents)
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


def all_documents(corpus: Corpus, name: str) -> list[str]:
    """Decode the texts of a domain, split after split."""
    return [text for split in SPLITS for text in documents_of(corpus, name, split)]


def assert_same(first: Corpus, second: Corpus) -> None:
    """Assert that two corpora differ only in the time, place and cost of their creation."""
    for corpus in (first, second):
        corpus.verify()  # checks files against the checksums that are compared below
    assert list(first.domains.items()) == list(second.domains.items())
    assert (first.hash, first.not_written) == (second.hash, second.not_written)
    assert left_in(first.root) == left_in(second.root)
    for name in (first.tokenizer.file, "sources.json"):
        assert (first.root / name).read_bytes() == (second.root / name).read_bytes()


def left_in(folder: Path) -> list[str]:
    """Names of the files in ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
