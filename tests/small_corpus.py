"""A small synthetic corpus that a tiny model learns in a dozen steps."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Cost,
    Domain,
    DomainSplit,
    Split,
    TokenizerIdentity,
    provenance,
)
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.tokenizer import load_tokenizer

# The size is odd, so that no tensor-parallel degree divides it and the last rows of the embedding
# are padding.
VOCAB_SIZE = 251
EOD = VOCAB_SIZE - 1
DOMAINS = ("news", "code", "poems")
TOKENIZER_HASH = "5" * 64
DOCUMENTS: dict[Split, int] = {"train": 60, "valid": 4, "test": 6}
# So many documents that MixMin can predict a gain.
PREDICTABLE: dict[Split, int] = {"train": 60, "valid": 30, "test": 2}
STATES, NOISE = 12, 0.1


def ring_document(number: int, rng: np.random.Generator) -> NDArray[np.integer]:
    """Return tokens of a walk around a ring of ``STATES`` tokens, with random jumps.

    Each step of the walk moves ``number`` + 1 tokens ahead.

    The tokens of the rings are spread over the whole vocabulary.
    """
    length = int(rng.integers(20, 200))
    state = (int(rng.integers(STATES)) + np.arange(length) * (number + 1)) % STATES
    ring = (number * 7 + state * 20) % EOD
    jumps = rng.random(length) < NOISE
    return np.where(jumps, rng.integers(0, EOD, length), ring)


Document = Callable[[int, np.random.Generator], NDArray[np.integer]]
Documents = dict[str, dict[Split, list[NDArray[np.integer]]]]


def write_small_corpus(
    root: Path,
    domains: Sequence[str] = DOMAINS,
    seed: int = 0,
    tokenizer_hash: str = TOKENIZER_HASH,
    document: Document = ring_document,
    counts: Mapping[Split, int] = MappingProxyType(DOCUMENTS),
) -> Corpus:
    """Write a corpus to ``root``, and load it.

    ``document`` returns the tokens of a random document of a domain, identified by its index, and
    ``counts`` has the documents of each split.
    """
    rng = np.random.default_rng(seed)
    documents: Documents = {
        name: {split: [document(number, rng) for _ in range(counts[split])] for split in SPLITS}
        for number, name in enumerate(domains)
    }
    return write_corpus(root, documents, tokenizer_hash)


def write_corpus(root: Path, documents: Documents, tokenizer_hash: str = TOKENIZER_HASH) -> Corpus:
    """Write a corpus of these documents, and append an end-of-document token to each."""
    found = {
        name: Domain(*(_write_split(root, name, split, texts[split]) for split in SPLITS))
        for name, texts in documents.items()
    }
    made_by = provenance(PreprocessOptions(SourceOptions(()), root, Path("tokenizer.json")), {})
    identity = TokenizerIdentity("tokenizers", "tokenizer.json", tokenizer_hash, VOCAB_SIZE, EOD)
    Corpus(root, identity, "uint16", found, made_by, Cost()).save()
    return Corpus.load(root)


def without_checksums(corpus: Corpus) -> Corpus:
    """Write the corpus without checksums, which imported files lack."""
    domains = {
        name: Domain(
            *(dataclasses.replace(domain.split(split), block_checksums=None) for split in SPLITS)
        )
        for name, domain in corpus.domains.items()
    }
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(corpus.root)


def without_training_text(corpus: Corpus, root: Path, name: str) -> Corpus:
    """Copy ``corpus`` to ``root``, without the training text of domain ``name``."""
    shutil.copytree(corpus.root, root)
    (root / "train" / f"{name}.bin").write_bytes(b"")
    (root / "train" / f"{name}.idx").write_bytes(bytes(index_file_bytes(0)))
    domain = corpus.domains[name]
    train = dataclasses.replace(domain.train, documents=0, tokens=0, block_checksums=None)
    domains = {**corpus.domains, name: dataclasses.replace(domain, train=train)}
    dataclasses.replace(corpus, root=root, domains=domains).save()
    return Corpus.load(root)


def word_tokenizer(path: Path) -> Path:
    """Write a tokenizer.json with the vocabulary of the corpus."""
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(EOD)}, unk_token="0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == EOD
    tokenizer.save(str(path))
    return path


def with_text(corpus: Corpus, root: Path, domain: str, split: Split) -> tuple[Corpus, Path]:
    """Copy ``corpus`` with a tokenizer to ``root``, and write a split of a domain as text.

    The key of the text is "words".
    """
    shutil.copytree(corpus.root, root)
    words = Tokenizer.from_file(str(word_tokenizer(root / "tokenizer.json")))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(root / "tokenizer.json"))
    tokenizer = load_tokenizer(root / "tokenizer.json")
    dataclasses.replace(corpus, root=root, tokenizer=tokenizer.identity).save()
    copy, text = Corpus.load(root), root / f"{domain}.jsonl"
    file = open_domains(copy).open(domain, split)
    documents = (" ".join(map(str, file.get(number)[:-1])) for number in range(len(file)))
    text.write_text("".join(f'{{"words": "{document}"}}\n' for document in documents))
    return copy, text


def _write_split(
    root: Path, name: str, split: Split, documents: Iterable[NDArray[np.integer]]
) -> DomainSplit:
    prefix = root / split / name
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, "uint16")
    for document in documents:
        writer.add(np.append(document, EOD))
    counts = (writer.documents, writer.tokens, writer.tokens)
    return DomainSplit(f"{split}/{name}", *counts, writer.finish(), writer.block_checksums)
