"""Clusters, bytes and the unigram model of held-out text, against plain counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.clusters import MAX_CLUSTERS
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.evaluation.held_out import choose_windows, held_out_text
from megatron_chameleon.evaluation.scored_text import ClusterMap, scored_text
from megatron_chameleon.evaluation.unigram import token_counts, unigram_loss
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.evaluation.plain_protocol import (
    DOCUMENTS,
    EOD,
    predictions,
    protocols,
    token_file,
)


@given(DOCUMENTS, protocols())
def test_every_document_with_scored_tokens_is_a_cluster_of_its_own(documents, protocol):
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    scored = [one.document for one in predictions(documents, protocol)]
    if text is None:
        return
    clusters = ClusterMap.of(tokens, text)
    found = [
        place
        for block in text.blocks()
        for place in clusters.at(text.scored_positions(*block)).tolist()
    ]
    # The same numbers for the same documents, in their order.
    order = {document: i for i, document in enumerate(sorted(set(scored)))}
    renumbered = {cluster: i for i, cluster in enumerate(sorted(set(found)))}
    assert [renumbered[place] for place in found] == [order[document] for document in scored]
    assert all(0 <= place < clusters.count for place in found)


@pytest.mark.parametrize("documents", [MAX_CLUSTERS, 1000])
def test_of_many_documents_neighbours_share_a_cluster(documents):
    tokens = token_file([[1, 2, EOD]] * documents)
    text = choose_windows(tokens.tokens, 7)
    clusters = ClusterMap.of(tokens, text)
    assert clusters.count == MAX_CLUSTERS
    found = clusters.at(np.arange(3 * documents))
    assert np.all(np.diff(found) >= 0)
    counts = np.bincount(found) // 3
    assert len(counts) == MAX_CLUSTERS
    assert counts.max() - counts.min() <= 1


def test_documents_that_a_limit_leaves_out_are_in_no_cluster():
    tokens = token_file([[1] * 9 + [EOD]] * 20)
    text = choose_windows(tokens.tokens, 10, max_tokens=40)
    clusters = ClusterMap.of(tokens, text)
    positions = np.concatenate([text.scored_positions(*block) for block in text.blocks()])
    documents = np.unique(positions // 10)
    assert clusters.count == len(documents) < 20
    assert np.unique(clusters.at(positions)).tolist() == list(range(clusters.count))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small corpus whose text has twice the bytes that its tokens decode to."""
    root = tmp_path_factory.mktemp("bytes")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    corpus = write_small_corpus(root, tokenizer_hash=sha256_of_files(tokenizer))
    sizes = token_bytes_of(corpus)
    domains = {
        name: dataclasses.replace(
            domain,
            test=dataclasses.replace(
                domain.test,
                text_bytes=2 * int(sizes[open_tokens(corpus, name, "test").tokens[:]].sum()),
            ),
        )
        for name, domain in corpus.domains.items()
    }
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(root)


def token_bytes_of(corpus: Corpus) -> np.ndarray:
    """Each token is a number in digits, with a space; the end-of-document token is nothing."""
    sizes = [len(str(token)) + 1 for token in range(corpus.tokenizer.vocab_size)]
    sizes[corpus.tokenizer.eod_id] = 0
    return np.array(sizes, np.int32)


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_tokens_and_bytes_are_counted_by_cluster(corpus, max_tokens):
    tokens = open_tokens(corpus, "code", "test")
    text = choose_windows(tokens.tokens, 16, max_tokens)
    clusters, sizes = ClusterMap.of(tokens, text), token_bytes_of(corpus)
    found = scored_text(corpus, "code", "test", text, clusters, sizes)
    expected_tokens, expected_bytes = np.zeros(clusters.count), np.zeros(clusters.count)
    for position in np.concatenate([text.scored_positions(*b) for b in text.blocks()]):
        cluster = clusters.at(np.array([position]))[0]
        expected_tokens[cluster] += 1
        expected_bytes[cluster] += 2 * sizes[tokens.tokens[position]]
    assert found.tokens.tolist() == expected_tokens.tolist()
    assert found.text_bytes is not None
    assert np.abs(found.text_bytes - expected_bytes).max() <= 1
    assert found.text_bytes.sum() == round(expected_bytes.sum())


def test_all_of_a_split_stands_for_all_of_its_text(corpus):
    tokens = open_tokens(corpus, "news", "test")
    text = choose_windows(tokens.tokens, 16)
    clusters, sizes = ClusterMap.of(tokens, text), token_bytes_of(corpus)
    found = scored_text(corpus, "news", "test", text, clusters, sizes)
    assert found.text_bytes is not None
    first = 2 * int(
        sizes[tokens.tokens[:1]].item()
    )  # no token stands before it, so it is not scored
    assert found.text_bytes.sum() == corpus.domains["news"].test.text_bytes - first


@pytest.mark.parametrize("cause", ["no tokenizer", "no bytes"])
def test_bytes_that_nobody_knows_are_none(corpus, cause):
    tokens = open_tokens(corpus, "news", "test")
    text = choose_windows(tokens.tokens, 16)
    sizes = None if cause == "no tokenizer" else token_bytes_of(corpus)
    if cause == "no bytes":
        domain = corpus.domains["news"]
        unknown = dataclasses.replace(domain.test, text_bytes=0)
        domains = {**corpus.domains, "news": dataclasses.replace(domain, test=unknown)}
        corpus = dataclasses.replace(corpus, domains=domains)
    clusters = ClusterMap.of(tokens, text)
    assert scored_text(corpus, "news", "test", text, clusters, sizes).text_bytes is None


def unigram_loss_direct(training, labels, vocab_size):
    """One label at a time, with one added to the count of every token."""
    total = 0.0
    for label in labels:
        count = sum(1 for token in training if token == label) + 1
        total -= np.log(count / (len(training) + vocab_size))
    return total / len(labels)


@given(
    st.lists(st.integers(0, 19), max_size=60),
    st.lists(st.integers(0, 19), min_size=1, max_size=60),
    st.integers(20, 40),
)
def test_the_unigram_loss_is_that_of_smoothed_frequencies(training, labels, vocab_size):
    counts, seen = (
        token_counts(np.array(stream, dtype=np.uint16), vocab_size) for stream in (training, labels)
    )
    loss = unigram_loss(counts, seen, vocab_size)
    assert loss == pytest.approx(unigram_loss_direct(training, labels, vocab_size), rel=1e-12)


def test_counting_in_pieces_counts_everything(monkeypatch):
    monkeypatch.setattr("megatron_chameleon.evaluation.unigram._CHUNK", 7)
    monkeypatch.setattr("megatron_chameleon.evaluation.held_out._BLOCK_WINDOWS", 3)
    stream = np.random.default_rng(0).integers(0, 30, 100).astype(np.uint16)
    counts = token_counts(stream, 40)
    assert counts.tolist() == [int((stream == token).sum()) for token in range(40)]
    text = choose_windows(stream, 8)
    assert [last - first for first, last in text.blocks()] == [3, 3, 3, 3, 1]
