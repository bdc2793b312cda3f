"""Embed windows with a small proxy on one rank, and fill an embedding store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe, EmbeddingStore
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.windows import draw_windows
from megatron_chameleon.embedding.embed import (
    StoreEntry,
    embed_windows,
    fill_store,
    missing_entries,
    open_store,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.flops import embedding_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from tests.small_corpus import VOCAB_SIZE, write_small_corpus

SHAPE = preset("nano", VOCAB_SIZE, max_sequence_length=32)
PROVENANCE = Provenance([], {}, {}, {}, None, "2026-01-01")
LAYER = 2
RECIPE = EmbeddingRecipe("m" * 64, LAYER, 32, 20, 0, "t" * 64, cross_documents=True)


def make_reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


@pytest.fixture(scope="module")
def reader(one_rank):
    return make_reader(one_rank)


@pytest.fixture
def windows(corpus):
    lengths = open_domains(corpus).open(corpus.names[0], "train").lengths
    return draw_windows(lengths, 32, 45, seed=1, name="a", within_documents=True)


def embed(reader, corpus, windows, batch_size, layer=LAYER, **more):
    tokens = open_domains(corpus).open(corpus.names[0], "train")
    with tqdm(total=len(windows), disable=True) as progress:
        return embed_windows(reader, tokens, windows, layer, batch_size, progress, "prose", **more)


def embed_direct(reader, corpus, windows, layer=LAYER, norm=lambda states: states):
    """Plain reference: one window at a time, without padding, averaged in float64."""
    tokens = open_domains(corpus).open(corpus.names[0], "train")
    rows = []
    for document, start, length in zip(
        windows.document, windows.start, windows.length, strict=True
    ):
        first = tokens.starts[document] + start
        text = tokens.tokens[first : first + length].astype(np.int64)
        states = norm(reader.hidden_states(torch.from_numpy(text)[None], layer))  # [s, 1, h]
        rows.append(states[:, 0].double().mean(0).detach().numpy())
    return np.stack(rows)


@pytest.fixture
def embedded(monkeypatch):
    """List of (sequences, tokens per sequence), with an entry for each forward pass."""
    shapes = []
    original = Reader.hidden_states

    def counting(self, tokens, layer, lengths=None):
        shapes.append(tuple(tokens.shape))
        return original(self, tokens, layer, lengths)

    monkeypatch.setattr(Reader, "hidden_states", counting)
    return shapes


def rows(shapes):
    return sum(sequences for sequences, _ in shapes)


@pytest.mark.parametrize(("layer", "batch_size"), [(1, 7), (4, 1), (4, 100)])
def test_vector_is_the_mean_hidden_state_of_its_window(reader, corpus, windows, batch_size, layer):
    vectors = embed(reader, corpus, windows, batch_size, layer)
    assert (vectors.shape, vectors.dtype) == ((45, SHAPE.hidden_size), np.float32)
    expected = embed_direct(reader, corpus, windows, layer)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_padding_to_few_widths_changes_no_vector(reader, corpus, windows, embedded, monkeypatch):
    """Batches are padded to multiples of 24 tokens, but at most to the model's 32 positions."""
    expected = embed(reader, corpus, windows, 1)
    embedded.clear()
    monkeypatch.setattr("megatron_chameleon.embedding.embed.length_multiple", lambda _layout: 24)
    np.testing.assert_allclose(embed(reader, corpus, windows, 1), expected, atol=1e-6)
    assert {width for _, width in embedded} == {24, 32}


def test_final_norm_and_windows_across_documents_match_the_reference(one_rank, corpus):
    reader = make_reader(one_rank)
    norm = reader.model.decoder.final_layernorm
    with torch.no_grad():  # initial ones and zeros would hide errors
        norm.weight.add_(torch.linspace(-0.5, 0.5, norm.weight.numel()))
        norm.bias.add_(torch.linspace(1.0, -1.0, norm.bias.numel()))
    lengths = open_domains(corpus).open(corpus.names[0], "train").lengths
    windows = draw_windows(lengths, 32, 20, 0, "a")
    assert (windows.start + windows.length > lengths[windows.document]).sum() > 3
    for final_norm, expected in ((False, lambda states: states), (True, norm)):
        vectors = embed(reader, corpus, windows, 7, final_norm=final_norm)
        direct = embed_direct(reader, corpus, windows, norm=expected)
        np.testing.assert_allclose(vectors, direct, atol=2e-6)


def test_states_that_are_not_finite_are_located(one_rank, corpus, windows):
    diverged = make_reader(one_rank)
    with torch.no_grad():
        diverged.model.decoder.layers[1].mlp.linear_fc2.bias[5] = float("inf")
    assert np.isfinite(embed(diverged, corpus, windows, 16, layer=1)).all()
    with pytest.raises(UserError, match=r"'prose'.* layer 2 .* 45 of 45 windows"):
        embed(diverged, corpus, windows, 16, layer=2)


def fill(folder: Path, corpus: Corpus, reader: Reader) -> EmbeddingStore:
    store = open_store(folder, RECIPE, SHAPE.hidden_size, PROVENANCE)
    entries = [StoreEntry(name, name, RECIPE) for name in corpus.names]
    domains = open_domains(corpus)
    missing = missing_entries(store, domains, entries)
    before = store.cost
    filled, spent = fill_store(store, domains, reader, missing, batch_size=8)
    assert filled.cost == before + spent
    return filled


def test_store_is_filled_once(reader, corpus, embedded, tmp_path):
    store = fill(tmp_path / "store", corpus, reader)
    assert rows(embedded) == 3 * RECIPE.num_windows
    assert EmbeddingStore.load(store.root) == store
    assert list(store.domains) == corpus.names
    flops = 0.0
    for name in corpus.names:
        assert store.holds(name, corpus.domain_hash(name))
        assert store.domains[name].tokens == 20 * 32
        lengths = open_domains(corpus).open(name, "train").lengths
        windows = draw_windows(lengths, 32, RECIPE.num_windows, RECIPE.seed, name)
        flops += sum(embedding_flops(SHAPE, LAYER, n, n) for n in windows.length.tolist())
        if name == corpus.names[0]:
            expected = embed(reader, corpus, windows.longest_first(), batch_size=1)
            np.testing.assert_allclose(store.vectors(name), expected, atol=1e-5)
    assert store.cost.flops == pytest.approx(flops)
    embedded.clear()
    assert fill(store.root, corpus, reader) == store
    assert embedded == []


def test_new_domains_and_changed_text_are_embedded(reader, embedded, tmp_path):
    folder = tmp_path / "store"
    before = fill(folder, write_small_corpus(tmp_path / "two", ("a", "b")), reader)
    old = before.vectors("a")
    embedded.clear()
    store = fill(folder, write_small_corpus(tmp_path / "three", ("a", "b", "c")), reader)
    assert rows(embedded) == RECIPE.num_windows
    assert list(store.domains) == ["a", "b", "c"]
    embedded.clear()
    changed = fill(folder, write_small_corpus(tmp_path / "new", ("a",), seed=1), reader)
    assert rows(embedded) == RECIPE.num_windows
    assert not np.array_equal(changed.vectors("a"), old)


def test_interrupted_fill_resumes_with_the_missing_domains(
    reader, corpus, embedded, monkeypatch, tmp_path
):
    whole = fill(tmp_path / "whole", corpus, reader)
    original = EmbeddingStore.write_domain

    def killed_at_the_second(store, *arguments):
        if store.domains:
            raise KeyboardInterrupt
        return original(store, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(EmbeddingStore, "write_domain", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path / "killed", corpus, reader)
    assert list(EmbeddingStore.load(tmp_path / "killed").domains) == corpus.names[:1]
    embedded.clear()
    found = fill(tmp_path / "killed", corpus, reader)
    assert rows(embedded) == sum(whole.domains[name].windows for name in corpus.names[1:])
    for name in corpus.names:
        np.testing.assert_array_equal(found.vectors(name), whole.vectors(name))
