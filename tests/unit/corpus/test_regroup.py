"""The documents of a corpus under other domains, and the bytes of text that each has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus import join
from megatron_chameleon.corpus import regroup as regrouping
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile, open_tokens
from megatron_chameleon.corpus.regroup import document_bytes, regroup, token_bytes
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer, load_tokenizer
from tests.small_corpus import word_tokenizer, write_small_corpus

NAMES = ["one", "t/w o", "three", "four"]
TEXTS = [
    "def f(x):\n\treturn x + 1\n",
    "  Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ",
    "Привет, мир! 日本語のテキスト 🙂🙃",
    "a",
    "the cat sat on the mat " * 40,
]


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / "old"
    root.mkdir()
    tokenizer = word_tokenizer(root / "tokenizer.json")
    return write_small_corpus(root, tokenizer_hash=sha256_of_files(tokenizer))


@pytest.fixture
def labels(corpus):
    """Random ones for two of the three domains; nothing of 'four' is in valid."""
    rng = np.random.default_rng(5)
    return {
        (name, split): rng.integers(
            0, 3 if split == "valid" else 4, corpus.domains[name].split(split).documents
        )
        for name in ("news", "poems")
        for split in SPLITS
    }


@pytest.fixture
def regrouped(corpus, labels, tmp_path):
    made = tmp_path / "new"
    made.mkdir()
    told: list[int] = []
    domains = regroup(corpus, labels, NAMES, corpus_tokenizer(corpus), made, told.append)
    corpus_tokenizer(corpus).save(made)
    dataclasses.replace(corpus, root=made, domains=domains).save()
    divided = sum(
        corpus.domains[name].split(split).tokens for name in ("news", "poems") for split in SPLITS
    )
    assert sum(told) == divided * corpus.token_bytes
    return Corpus.load(made)


def documents(corpus, name, split):
    tokens = open_tokens(corpus, name, split)
    return [tokens.get(i).tolist() for i in range(len(tokens))]


def test_every_document_is_where_its_label_says_with_the_same_tokens(corpus, labels, regrouped):
    assert regrouped.names == ["code", *NAMES]
    regrouped.verify()
    for split in SPLITS:
        for number, new in enumerate(NAMES):
            expected = [
                document
                for name in ("news", "poems")
                for document, label in zip(
                    documents(corpus, name, split), labels[name, split], strict=True
                )
                if label == number
            ]
            assert documents(regrouped, new, split) == expected
    assert regrouped.domains["four"].valid.documents == 0


def test_what_megatron_reads_is_the_same(labels, regrouped):
    dataset = IndexedDataset(str(regrouped.prefix("three", "train")))
    assert [item.tolist() for item in dataset] == documents(regrouped, "three", "train")
    assert len(dataset.document_indices) == len(dataset) + 1
    assert len(dataset) == sum((labels[name, "train"] == 2).sum() for name in ("news", "poems"))


def test_a_domain_that_is_not_divided_stays_as_it_is(corpus, regrouped):
    assert regrouped.domain_hash("code") == corpus.domain_hash("code")
    for split in SPLITS:
        assert documents(regrouped, "code", split) == documents(corpus, "code", split)


def test_bytes_of_text_add_up_to_what_was_counted(corpus, regrouped):
    for split in SPLITS:
        before = sum(corpus.domains[name].split(split).text_bytes for name in ("news", "poems"))
        assert sum(regrouped.domains[name].split(split).text_bytes for name in NAMES) == before


def test_blocks_and_full_memory_change_nothing(corpus, labels, regrouped, tmp_path, monkeypatch):
    monkeypatch.setattr(regrouping, "_BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(join, "_WAITING_BYTES", 100)
    monkeypatch.setattr(regrouping, "_BLOCK_TOKENS", 300)
    again = tmp_path / "again"
    again.mkdir()
    domains = regroup(corpus, labels, NAMES, corpus_tokenizer(corpus), again, lambda _: None)
    assert domains == regrouped.domains


def encoded(tokenizer, texts):
    tokens, lengths = tokenizer.encode_documents(texts)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1)
    checked = BlockTokens(Path("texts"), tokens)
    return TokenFile(Path("texts"), checked, lengths, starts * tokens.itemsize, boundaries)


@pytest.mark.parametrize("kind", ["tokenizer_json", "sentencepiece_model"])
def test_bytes_of_documents_are_about_those_of_their_text(kind, request, texts):
    eod = {"tokenizer_json": "<|endoftext|>", "sentencepiece_model": "</s>"}[kind]
    tokenizer = load_tokenizer(request.getfixturevalue(kind), eod)
    some = [*texts(20), *TEXTS]
    expected = [len(text.encode()) for text in some]
    found = document_bytes(encoded(tokenizer, some), token_bytes(tokenizer), sum(expected))
    assert found.sum() == sum(expected)
    np.testing.assert_allclose(found, expected, atol=4, rtol=0.02)


def test_a_text_of_tokens_that_say_nothing_is_dealt_out_by_tokens(tokenizer_json):
    tokens = encoded(load_tokenizer(tokenizer_json, "<|endoftext|>"), ["ab", "abcdef"])
    found = document_bytes(tokens, np.zeros(10_000, np.int32), 100)
    assert found.sum() == 100
    np.testing.assert_allclose(found, 100 * tokens.lengths / tokens.lengths.sum(), atol=1)
