"""Make corpora and read their contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import SPLITS, Corpus, Split
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.join import regroup
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


def tokens_of(corpus: Corpus, name: str, split: Split) -> list[list[int]]:
    """Return the tokens of each document of a split."""
    file = open_domains(corpus).open(name, split)
    return [file.get(number).tolist() for number in range(len(file))]


def documents_of(corpus: Corpus, name: str, split: Split) -> list[str]:
    """Decode the texts of a split from its files."""
    tokenizer, documents = corpus_tokenizer(corpus), tokens_of(corpus, name, split)
    assert all(document[-1] == corpus.tokenizer.eod_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def all_documents(corpus: Corpus, name: str) -> list[str]:
    """Decode the texts of a domain, split after split."""
    return [text for split in SPLITS for text in documents_of(corpus, name, split)]


def regrouped(corpus: Corpus, divided: Sequence[str], names: list[str], root: Path) -> Corpus:
    """Move the documents of domains ``divided`` to new domains ``names`` at random, and check them.

    The last of ``names`` gets no validation documents.
    """
    tokenizer, rng = corpus_tokenizer(corpus), np.random.default_rng(5)
    labels = {
        (name, split): rng.integers(
            0, len(names) - (split == "valid"), corpus.domains[name].split(split).documents
        )
        for name in divided
        for split in SPLITS
    }
    root.mkdir()
    domains = regroup(corpus, labels, names, tokenizer, root, lambda num_bytes: None)
    tokenizer.save(root)
    dataclasses.replace(corpus, root=root, domains=domains).save()
    new = Corpus.load(root)
    new.verify()
    others = [name for name in corpus.names if name not in divided]
    assert new.names == [*others, *names]
    for name in others:
        assert new.domain_hash(name) == corpus.domain_hash(name)
    for split in SPLITS:
        documents = [tokens for name in divided for tokens in tokens_of(corpus, name, split)]
        targets = np.concatenate([labels[name, split] for name in divided])
        for number, name in enumerate(names):
            expected = [documents[i] for i in np.flatnonzero(targets == number)]
            assert tokens_of(new, name, split) == expected
    return new


def assert_same_tokens(first: Corpus, second: Corpus) -> None:
    """Assert that two corpora have the same tokens. Their sources and chunks may differ."""
    for corpus in (first, second):
        corpus.verify()  # checks files against the checksums that are compared below
    assert list(first.domains.items()) == list(second.domains.items())
    assert (first.hash, first.not_written) == (second.hash, second.not_written)


def assert_same(first: Corpus, second: Corpus) -> None:
    """Assert that two corpora differ only in the time, place and cost of their creation."""
    assert_same_tokens(first, second)
    assert left_in(first.root) == left_in(second.root)
    for name in (first.tokenizer.file, "sources.json"):
        assert (first.root / name).read_bytes() == (second.root / name).read_bytes()


def left_in(folder: Path) -> list[str]:
    """Names of the files in ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
