"""Sums of losses, clusters, bytes and unigram counts compared with plain enumerations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megatron_chameleon.artifacts import Corpus, Protocol
from megatron_chameleon.artifacts.clusters import MAX_CLUSTERS
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.evaluation.held_out import choose_windows, held_out_text, reading_flops
from megatron_chameleon.evaluation.perplexity import (
    ClusterMap,
    cluster_losses,
    scored_text,
    token_counts,
)
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.evaluation.plain_protocol import (
    DOCUMENTS,
    EOD,
    predictions,
    protocols,
    token_file,
)

SHAPE = ModelShape(model_size("nano"), vocab_size=250, max_sequence_length=32)


@dataclasses.dataclass
class LabelReader:
    """In place of a model: the loss of a token is a number that stands for it alone."""

    data_rank: int = 0
    data_size: int = 1
    speaks: bool = True

    @property
    def layout(self) -> Any:
        return SimpleNamespace(
            data_rank=self.data_rank,
            data_size=self.data_size,
            tensor_size=2,
            sequence_parallel=False,
            device=torch.device("cpu"),
            is_last_stage=self.speaks,
        )

    def token_losses(self, tokens, labels):
        return torch.sqrt(labels.float() + 2) if self.speaks else None

    def sum_over_ranks(self, values, *, spoken):
        assert spoken == self.speaks
        return values


def sums_of(reader, tokens, text, batch_size):
    with tqdm(total=text.num_predictions, disable=True) as progress:
        updates: list[int] = []
        progress.update = updates.append
        sums = cluster_losses(reader, text, ClusterMap.of(tokens, text), batch_size, progress)
    assert sum(updates) == text.num_predictions  # the bar ends where it should
    return sums


@given(DOCUMENTS, protocols(), st.integers(1, 7), st.integers(1, 4))
def test_ranks_share_the_batches_and_each_document_gets_its_tokens(
    documents, protocol, batch_size, data_size
):
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    if text is None:
        return
    parts = [
        sums_of(LabelReader(rank, data_size), tokens, text, batch_size) for rank in range(data_size)
    ]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += np.sqrt(np.float32(one.label + 2))
    found = np.sum(parts, axis=0)
    assert found[found > 0] == pytest.approx(expected[expected > 0], rel=1e-12)


def test_windows_cost_what_their_own_lengths_cost():
    text = choose_windows(np.zeros(2 * 16 + 5 + 1, np.uint16), 16, overlap=0)
    expected = 2 * forward_flops(SHAPE, 16, 16) + forward_flops(SHAPE, 5, 5)
    assert reading_flops(SHAPE, text) == expected
    assert expected != forward_flops(SHAPE, 37, 16)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


def loss_of(reader: Reader, context: tuple[int, ...], label: int) -> float:
    """Of one token, by the logits of its own context alone, its softmax in float64."""
    tokens = torch.tensor([context])
    with torch.no_grad():
        logits = reader.model(tokens, torch.arange(len(context))[None], None)
    return -float(logits[0, -1, : SHAPE.vocab_size].double().log_softmax(-1)[label])


PROTOCOLS = [
    Protocol("test", 32),
    Protocol("test", 13, overlap=5),
    Protocol("test", 32, end_of_document=False),
    Protocol("test", 32, packing="documents", first_token="after-eod"),
    Protocol("test", 16, packing="documents", overlap=15),
    Protocol("test", 9, packing="documents", overlap=4, first_token="after-eod"),
    Protocol("test", 32, packing="documents", end_of_document=False, first_token="after-eod"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.packing}-{p.window_length}")
def test_a_real_models_sums_are_those_of_every_token_by_itself(reader, protocol):
    rng = np.random.default_rng(protocol.window_length)
    lengths = (1, 50, 2, 0, 33, 7)
    documents = [[*rng.integers(10, 250, n - 1).tolist(), EOD] if n else [] for n in lengths]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += loss_of(reader, one.context, one.label)
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    assert text is not None
    for batch_size in (1, 3, 64):
        found = sums_of(reader, tokens, text, batch_size)
        assert found[found > 0] == pytest.approx(expected[expected > 0], abs=2e-5)


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


def test_counting_in_pieces_counts_everything(monkeypatch):
    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity._CHUNK", 7)
    monkeypatch.setattr("megatron_chameleon.evaluation.held_out._BLOCK_WINDOWS", 3)
    stream = np.random.default_rng(0).integers(0, 30, 100).astype(np.uint16)
    counts = token_counts(stream, 40)
    assert counts.tolist() == [int((stream == token).sum()) for token in range(40)]
    text = choose_windows(stream, 8)
    assert [last - first for first, last in text.blocks()] == [3, 3, 3, 3, 1]
