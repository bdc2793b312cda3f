"""A small corpus of random tokens, made without text or tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Cost,
    Domain,
    DomainSplit,
    TokenizerIdentity,
    provenance,
)
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions

EOD, VOCAB_SIZE = 0, 1000


def write_split(root: Path, name: str, lengths: list[int], rng: np.random.Generator) -> DomainSplit:
    (root / "tokens").mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(root / "tokens" / name, "uint16")
    for length in lengths:
        writer.add(np.append(rng.integers(1, VOCAB_SIZE, length - 1), EOD))
    counts = (writer.documents, writer.tokens, sum(lengths))
    return DomainSplit(f"tokens/{name}", *counts, writer.finish(), writer.block_checksums)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """``make_corpus({"a": [5, 3], "b": [9]})``: domains with documents of these lengths."""

    def make(lengths: dict[str, list[int]], seed: int = 0, folder: str = "corpus") -> Corpus:
        rng = np.random.default_rng(seed)
        root = tmp_path / folder
        domains = {
            name: Domain(
                **{split: write_split(root, f"{name}-{split}", docs, rng) for split in SPLITS}
            )
            for name, docs in lengths.items()
        }
        options = PreprocessOptions(SourceOptions(()), root, Path("tokenizer.json"))
        identity = TokenizerIdentity("tokenizers", "tokenizer.json", "0" * 64, VOCAB_SIZE, EOD)
        corpus = Corpus(root, identity, "uint16", domains, provenance(options, {}), Cost())
        corpus.save()
        return Corpus.load(root)

    return make
