"""Windows through a real proxy on one rank, and the store that keeps what came out."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe, EmbeddingStore
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.embedding.embed import (
    embed_windows,
    fill_store,
    missing_domains,
    open_store,
)
from megatron_chameleon.embedding.windows import draw_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import embedding_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size
from tests.small_corpus import VOCAB_SIZE, write_small_corpus

SHAPE = ModelShape(model_size("nano"), VOCAB_SIZE, max_sequence_length=32)
MADE = Provenance([], {}, {}, {}, None, "2026-01-01")
LAYER = 2
RECIPE = EmbeddingRecipe("m" * 64, LAYER, 32, 20, seed=0, tokenizer_hash="t" * 64)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


def lengths_of(corpus: Corpus, name: str) -> NDArray[np.integer]:
    """A copy: megatron's own are a view of a file that is unmapped with its data set."""
    indexed = open_tokens(corpus, name, "train")
    return np.array(indexed.lengths)


@pytest.fixture
def windows(corpus):
    lengths = lengths_of(corpus, corpus.names[0])
    return draw_windows(lengths, 32, 45, seed=1, name="a")


def embed(reader, corpus, windows, batch_size, layer=LAYER, **more):
    tokens = open_tokens(corpus, corpus.names[0], "train")
    with tqdm(total=len(windows), disable=True) as progress:
        return embed_windows(reader, tokens, windows, layer, batch_size, progress, "prose", **more)


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 45, 100])
def test_a_vector_is_the_mean_hidden_state_of_its_window_alone(
    reader, corpus, windows, batch_size, layer
):
    vectors = embed(reader, corpus, windows, batch_size, layer)
    assert vectors.shape == (45, SHAPE.size.hidden_size)
    assert vectors.dtype == np.float32
    tokens = open_tokens(corpus, corpus.names[0], "train")
    for row, vector in enumerate(vectors):
        start, length = windows.start[row], windows.length[row]
        text = tokens.get(int(windows.document[row]), start, length).astype(np.int64)
        hidden = reader.hidden_states(torch.from_numpy(text)[None], layer)  # [s, 1, h]
        np.testing.assert_allclose(vector, hidden[:, 0].double().mean(0).numpy(), atol=1e-6)


def test_padding_to_few_widths_changes_no_vector(reader, corpus, windows, monkeypatch):
    """As on a GPU; but never beyond the positions that the model has."""
    expected, widths = embed(reader, corpus, windows, 1), set()
    hidden_states = Reader.hidden_states

    def spied(reader, tokens, layer):
        widths.add(tokens.size(1))
        return hidden_states(reader, tokens, layer)

    monkeypatch.setattr(Reader, "hidden_states", spied)
    monkeypatch.setattr("megatron_chameleon.embedding.embed.length_multiple", lambda _layout: 24)
    np.testing.assert_allclose(embed(reader, corpus, windows, 1), expected, atol=1e-6)
    assert widths == {24, 32}


def test_the_final_norm_is_applied_to_every_state_by_option(reader, corpus, windows):
    norm = reader.model.decoder.final_layernorm
    with torch.no_grad():  # otherwise it is one of ones and zeros
        norm.weight.add_(torch.linspace(-0.5, 0.5, norm.weight.numel()))
        norm.bias.add_(torch.linspace(1.0, -1.0, norm.bias.numel()))
    vectors = embed(reader, corpus, windows, 7, final_norm=True)
    tokens = open_tokens(corpus, corpus.names[0], "train")
    for row, vector in enumerate(vectors):
        start, length = windows.start[row], windows.length[row]
        text = tokens.get(int(windows.document[row]), start, length).astype(np.int64)
        states = norm(reader.hidden_states(torch.from_numpy(text)[None], LAYER))
        np.testing.assert_allclose(vector, states[:, 0].double().mean(0).detach(), atol=2e-6)


def test_a_window_goes_on_in_the_next_document(reader, corpus):
    tokens = open_tokens(corpus, corpus.names[0], "train")
    windows = draw_windows(tokens.lengths, 32, 20, 0, "a", cross_documents=True)
    ends = windows.start + windows.length
    assert (ends > tokens.lengths[windows.document]).sum() > 3
    vectors = embed(reader, corpus, windows, 7)
    for row, vector in enumerate(vectors):
        first = tokens.starts[windows.document[row]] + windows.start[row]
        text = tokens.tokens[first : first + windows.length[row]].astype(np.int64)
        hidden = reader.hidden_states(torch.from_numpy(text)[None], LAYER)
        np.testing.assert_allclose(vector, hidden[:, 0].double().mean(0).numpy(), atol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_proxy_that_has_diverged_is_told_with_the_layer(one_rank, corpus, windows, poison):
    model = build_model(SHAPE, one_rank, seed=3)
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc2.bias[5] = poison
    broken = Reader(model, SHAPE, one_rank)
    assert np.isfinite(embed(broken, corpus, windows, 16, layer=1)).all()
    problem = (
        r"domain 'prose': hidden states after layer 2 are not finite in 45 of 45 windows "
        r"\(first: tokens \d+ to \d+ of document \d+, counted from 0\); the proxy has diverged"
    )
    with pytest.raises(UserError, match=problem):
        embed(broken, corpus, windows, 16, layer=2)


def test_a_proxy_broken_for_one_token_names_the_windows_that_hold_it(one_rank, corpus, windows):
    model = build_model(SHAPE, one_rank, seed=3)
    tokens = open_tokens(corpus, corpus.names[0], "train")
    texts = [
        tokens.get(int(d), int(s), int(n))
        for d, s, n in zip(windows.document, windows.start, windows.length, strict=True)
    ]
    rare = min(range(VOCAB_SIZE), key=lambda token: sum(token in t for t in texts) or 99)
    held = [row for row, text in enumerate(texts) if rare in text]
    with torch.no_grad():
        model.embedding.word_embeddings.weight[rare] = float("nan")
    document, start, length = min(
        (int(windows.document[row]), int(windows.start[row]), int(windows.length[row]))
        for row in held
    )
    told = f"tokens {start} to {start + length - 1} of document {document}"
    problem = rf"domain 'prose': .* in {len(held)} of 45 windows \(first: {told}, counted"
    with pytest.raises(UserError, match=problem):
        embed(Reader(model, SHAPE, one_rank), corpus, windows, 16)


@pytest.fixture
def counted(reader, monkeypatch):
    """Windows that went through the model, as a list of batches' sizes."""
    batches = []
    original = Reader.hidden_states

    def counting(self, tokens, layer):
        batches.append(tokens.size(0))
        return original(self, tokens, layer)

    monkeypatch.setattr(Reader, "hidden_states", counting)
    return batches


def fill(folder: Path, corpus: Corpus, reader: Reader) -> EmbeddingStore:
    store = open_store(folder, RECIPE, SHAPE.size.hidden_size, MADE)
    missing = missing_domains(store, corpus, corpus.names)
    before = store.cost
    filled, spent = fill_store(store, corpus, reader, missing, batch_size=8)
    assert filled.cost == before + spent
    return filled


def test_every_domain_is_embedded_and_written(reader, corpus, counted, tmp_path):
    store = fill(tmp_path / "store", corpus, reader)
    assert sum(counted) == 3 * RECIPE.num_windows
    assert EmbeddingStore.load(tmp_path / "store") == store
    assert list(store.domains) == corpus.names
    for name in corpus.names:
        assert store.vectors(name).shape == (RECIPE.num_windows, SHAPE.size.hidden_size)
        assert store.holds(name, corpus.domain_hash(name))
    means = [store.vectors(name).mean(axis=0) for name in corpus.names]
    assert not np.allclose(means[0], means[1], atol=1e-3)


def test_vectors_are_those_of_the_drawn_windows(reader, corpus, tmp_path):
    name = corpus.names[0]
    lengths = lengths_of(corpus, name)
    windows = draw_windows(lengths, 32, RECIPE.num_windows, RECIPE.seed, name)
    expected = embed(reader, corpus, windows, batch_size=1)
    stored = fill(tmp_path / "store", corpus, reader).vectors(name)
    # The store may keep them in another order, in which each window's vector is found once.
    apart = np.abs(stored[:, None] - expected[None]).max(axis=-1)
    assert sorted(apart.argmin(axis=1)) == list(range(RECIPE.num_windows))
    assert apart.min(axis=1).max() < 1e-5


def test_the_cost_is_that_of_the_tokens_read(reader, corpus, tmp_path):
    store = fill(tmp_path / "store", corpus, reader)
    flops = 0.0
    for name in corpus.names:
        windows = draw_windows(lengths_of(corpus, name), 32, RECIPE.num_windows, 0, name)
        flops += sum(embedding_flops(SHAPE, LAYER, n, n) for n in windows.length.tolist())
    assert store.cost.flops == pytest.approx(flops)
    assert store.cost.wall_seconds > 0


def test_a_second_fill_embeds_nothing(reader, corpus, counted, tmp_path):
    first = fill(tmp_path / "store", corpus, reader)
    files = {path: path.stat().st_mtime_ns for path in first.root.iterdir()}
    counted.clear()
    assert fill(tmp_path / "store", corpus, reader) == first
    assert counted == []
    assert {path: path.stat().st_mtime_ns for path in first.root.iterdir()} == files


def test_only_the_new_domain_is_embedded(reader, counted, tmp_path):
    fill(tmp_path / "store", write_small_corpus(tmp_path / "two", ("a", "b")), reader)
    counted.clear()
    grown = write_small_corpus(tmp_path / "three", ("a", "b", "c"))
    store = fill(tmp_path / "store", grown, reader)
    assert sum(counted) == RECIPE.num_windows
    assert list(store.domains) == ["a", "b", "c"]


class Killed(BaseException):
    """In the place of a signal that cannot be caught: nothing handles it."""


def test_a_fill_that_ends_between_domains_goes_on_with_those_that_are_left(
    reader, corpus, counted, monkeypatch, tmp_path
):
    whole = fill(tmp_path / "whole", corpus, reader)

    def killed_at_the_second(store, *arguments):
        if store.domains:
            raise Killed
        return original(store, *arguments)

    original = EmbeddingStore.with_domain
    with monkeypatch.context() as patched:
        patched.setattr(EmbeddingStore, "with_domain", killed_at_the_second)
        with pytest.raises(Killed):
            fill(tmp_path / "killed", corpus, reader)
    assert list(EmbeddingStore.load(tmp_path / "killed").domains) == corpus.names[:1]
    counted.clear()
    found = fill(tmp_path / "killed", corpus, reader)
    assert sum(counted) == sum(whole.domains[name].windows for name in corpus.names[1:])
    for name in corpus.names:
        np.testing.assert_array_equal(found.vectors(name), whole.vectors(name))


def test_a_domain_whose_text_changed_is_embedded_again(reader, counted, tmp_path):
    before = fill(tmp_path / "store", write_small_corpus(tmp_path / "one", ("a",)), reader)
    old = before.vectors("a")
    counted.clear()
    after = fill(tmp_path / "store", write_small_corpus(tmp_path / "new", ("a",), seed=1), reader)
    assert sum(counted) == RECIPE.num_windows
    assert not np.array_equal(after.vectors("a"), old)


RECIPE_CHANGES = [
    ("model_hash", "x", "proxy"),
    ("layer", 3, r"layer \(2, now 3\)"),
    ("window_length", 16, r"window length \(32, now 16\)"),
    ("num_windows", 99, r"number of windows \(20, now 99\)"),
    ("seed", 7, r"extraction seed \(0, now 7\)"),
    ("tokenizer_hash", "x", "tokenizer"),
    ("cross_documents", True, r"choice of whether windows cross documents"),
    ("dtype", "bfloat16", r"data type"),
    ("final_norm", True, r"choice of whether the final norm is applied"),
]


@pytest.mark.parametrize(("field", "value", "told"), RECIPE_CHANGES)
def test_a_store_of_another_recipe_is_refused(reader, corpus, tmp_path, field, value, told):
    fill(tmp_path / "store", corpus, reader)
    other = dataclasses.replace(RECIPE, **{field: value})
    with pytest.raises(UserError, match=f"embeddings of another {told}.*pass another --store"):
        open_store(tmp_path / "store", other, SHAPE.size.hidden_size, MADE)


def test_every_field_of_a_recipe_is_compared():
    compared = {field for field, _, _ in RECIPE_CHANGES}
    assert {field.name for field in dataclasses.fields(EmbeddingRecipe)} == compared


def test_an_index_that_is_not_the_corpus_s_is_refused(reader, corpus, tmp_path):
    copy = Path(shutil.copytree(corpus.root, tmp_path / "copy"))
    damaged = Corpus.load(copy)
    index = Path(f"{damaged.prefix(damaged.names[0], 'train')}.idx")
    index.write_bytes(b"x" * index.stat().st_size)
    with pytest.raises(UserError, match=r"\.idx is damaged"):
        fill(tmp_path / "store", Corpus.load(copy), reader)
    assert not (tmp_path / "store").exists()
