"""Vectors of documents: which windows they are made of, their means, and the files they are in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.discovery.vectors import (
    DocumentBlock,
    DocumentRecipe,
    DocumentVectors,
    embed_block,
    spread_windows,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size
from tests.small_corpus import VOCAB_SIZE, write_small_corpus

SHAPE = ModelShape(model_size("nano"), VOCAB_SIZE, max_sequence_length=32)
LAYER = 2
RECIPE = DocumentRecipe("m" * 64, LAYER, 32, 3)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=20),
    st.integers(1, 70),
    st.integers(1, 6),
)
def test_every_document_has_some_windows_that_lie_apart_in_it(lengths, window_length, most):
    windows = spread_windows(np.array(lengths), window_length, most)
    assert windows.length.min() >= 1
    assert windows.length.max() <= window_length
    for document, length in enumerate(lengths):
        here = windows.document == document
        start, end = windows.start[here], (windows.start + windows.length)[here]
        assert here.sum() == min(most, -(-length // window_length))
        assert start[0] >= 0
        assert end[-1] <= length
        assert (start[1:] >= end[:-1]).all()
        if here.sum() < most:  # all of its text
            assert windows.length[here].sum() == length


def test_windows_are_spread_over_the_whole_document():
    windows = spread_windows(np.array([1000]), 10, 4)
    assert windows.start.tolist() == [120, 370, 620, 870]


def test_a_document_is_the_mean_of_its_windows(reader, corpus):
    name = corpus.names[1]
    tokens = open_tokens(corpus, name, "train")
    block = DocumentBlock(name, "train", 20, 45)
    windows = spread_windows(tokens.lengths[20:45], 32, 3)
    with tqdm(total=len(windows), disable=True) as progress:
        vectors = embed_block(reader, tokens, block, windows, LAYER, 7, progress)
    assert vectors.shape == (25, SHAPE.size.hidden_size)
    assert vectors.dtype == np.float32
    for row, vector in enumerate(vectors):
        means = []
        for start, length in zip(
            windows.start[windows.document == row],
            windows.length[windows.document == row],
            strict=True,
        ):
            text = tokens.get(20 + row, int(start), int(length)).astype(np.int64)
            hidden = reader.hidden_states(torch.from_numpy(text)[None], LAYER)
            means.append(hidden[:, 0].double().mean(0).numpy())
        np.testing.assert_allclose(vector, np.mean(means, axis=0), atol=1e-6)


def test_blocks_hold_every_document_once(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_chameleon.methods.discovery.vectors.BLOCK_DOCUMENTS", 25)
    vectors = DocumentVectors(tmp_path, corpus, RECIPE, 8)
    blocks = list(vectors.blocks("news", "train"))
    assert [(block.first, block.stop) for block in blocks] == [(0, 25), (25, 50), (50, 60)]
    assert len({vectors.path(block) for block in blocks}) == 3


def test_vectors_are_read_as_they_were_written_and_damage_is_told(corpus, tmp_path):
    vectors = DocumentVectors(tmp_path, corpus, RECIPE, 8)
    (block,) = vectors.blocks("news", "valid")
    values = np.random.default_rng(0).standard_normal((block.stop, 8)).astype(np.float32)
    vectors.write(block, values)
    np.testing.assert_array_equal(vectors.read(block), values)
    path = vectors.path(block)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
    with pytest.raises(UserError, match="delete it and run again"):
        dataclasses.replace(vectors, hidden_size=9).read(block)
    content = path.read_bytes()
    for damaged in (content[:-5], content[:200] + b"\1" + content[201:], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checksum; delete it and run again"):
            vectors.read(block)


def test_other_text_or_another_recipe_has_other_files(corpus, tmp_path):
    vectors = DocumentVectors(tmp_path / "store", corpus, RECIPE, 8)
    changed = write_small_corpus(tmp_path / "corpus", seed=1)
    recipes = [
        dataclasses.replace(RECIPE, **change)
        for change in (
            {"model_hash": "n" * 64},
            {"layer": 1},
            {"window_length": 16},
            {"windows_per_document": 2},
        )
    ]
    others = [dataclasses.replace(vectors, recipe=recipe) for recipe in recipes]
    others.append(dataclasses.replace(vectors, corpus=changed))
    folders = {each.domain_folder("news") for each in [vectors, *others]}
    assert len(folders) == 6
