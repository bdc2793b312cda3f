"""Make corpora and read their contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import SPLITS, Corpus, Split
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer


def source_options(*inputs: object, **options: Any) -> SourceOptions:
    """The options for these inputs."""
    return SourceOptions((tuple(str(path) for path in inputs),), **options)


def make_corpus(options: PreprocessOptions) -> Corpus:
    """The corpus made with ``options``."""
    preprocess_data(options)
    return Corpus.load(options.output)


def documents_of(corpus: Corpus, name: str, split: Split) -> list[str]:
    """The texts of a split, decoded from its files."""
    tokenizer = corpus_tokenizer(corpus)
    file = open_tokens(corpus, name, split)
    documents = np.split(file.tokens, np.cumsum(file.lengths)[:-1])
    assert all(document[-1] == corpus.tokenizer.eod_id for document in documents)
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


def all_documents(corpus: Corpus, name: str) -> list[str]:
    """The texts of a domain, split after split."""
    return [text for split in SPLITS for text in documents_of(corpus, name, split)]


def files_of(corpus: Corpus) -> dict[str, bytes]:
    """The contents of all files in the folder, by name."""
    files = sorted(path for path in corpus.root.rglob("*") if path.is_file())
    return {str(path.relative_to(corpus.root)): path.read_bytes() for path in files}


def record_of(corpus: Corpus) -> dict[str, Any]:
    """The contents of corpus.json without time, place and cost of making it."""
    record = json.loads((corpus.root / "corpus.json").read_text())
    for name in ("created", "command", "git_commit"):  # someone may be at work on the sources
        del record["provenance"][name]
    del record["cost"], record["checksum"], record["provenance"]["options"]["output"]
    assert isinstance(record, dict)
    return record


def assert_same(first: Corpus, second: Corpus) -> None:
    """Assert that both folders are byte-identical."""
    assert record_of(first) == record_of(second)
    files, others = files_of(first), files_of(second)
    del files["corpus.json"], others["corpus.json"]
    assert list(files) == list(others)
    for name, content in files.items():
        assert content == others[name], name


def left_in(folder: Path) -> list[str]:
    """Names of the files in ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
