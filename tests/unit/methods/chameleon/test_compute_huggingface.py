"""Chameleon with a Hugging Face model as the proxy, from a corpus to its vectors."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants

from megatron_chameleon.artifacts import EmbeddingRecipe, EmbeddingStore, Mixture
from megatron_chameleon.checkpoint.convert import convert_to_checkpoint
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.windows import draw_windows, split_at_documents
from megatron_chameleon.embedding.embed import StoreEntry
from megatron_chameleon.embedding.proxy import open_proxy
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import (
    ChameleonOptions,
    ExtractionOptions,
    WeightingOptions,
)
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from tests.huggingface_models import (
    CLS,
    DIGITS,
    SEP,
    write_digits_tokenizer,
    write_model,
    write_tokenizer,
)
from tests.small_corpus import DOMAINS, EOD
from tests.unit.corpus.small_hub import serve

LAYER, WINDOW = 2, 32
WORDS = [str(number) for number in range(EOD)]
EXTRACTION = ExtractionOptions(layer=LAYER, window_length=WINDOW, num_windows=40)


@pytest.fixture
def compute(numbers_corpus, tmp_path):
    """``compute(checkpoint, **changes)``: run the method and load its mixture and its store."""

    def run(checkpoint, extraction=EXTRACTION, **changes):
        output = tmp_path / f"out-{Path(checkpoint).name}" / "mixture.json"
        weighting = WeightingOptions("scaled", bootstrap_resamples=2)
        options = ChameleonOptions(
            corpus=numbers_corpus.root,
            checkpoint=Path(checkpoint),
            output=output,
            extraction=extraction,
            weighting=weighting,
            **changes,
        )
        compute_mixture(options)
        return Mixture.load(output), EmbeddingStore.load(output.parent / "embeddings")

    return run


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_vectors_equal_those_of_our_model(compute, numbers_corpus, tmp_path, family):
    """A folder of a family that we train gives the same vectors, converted or not."""
    folder, checkpoint = write_model(tmp_path / "model", family), tmp_path / "checkpoint"
    write_tokenizer(folder, WORDS)
    convert_to_checkpoint(FromHuggingFaceOptions(model=folder, output=checkpoint))
    (theirs, their_store), (ours, our_store) = compute(folder), compute(checkpoint)
    assert their_store.recipe.tokenizer_hash == numbers_corpus.tokenizer.sha256
    for name in DOMAINS:
        found, expected = their_store.vectors(name), our_store.vectors(name)
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert theirs.weights == pytest.approx(ours.weights, abs=1e-4)
    # transformers' count includes biases and norms.
    costs = [store.cost.flops for store in (their_store, our_store)]
    assert 1 <= costs[0] / costs[1] < 1.05
    with pytest.raises(UserError, match="--trust-remote-code"):
        open_proxy(checkpoint, trust_remote_code=True)


def test_text_of_another_tokenizer_is_decoded_and_encoded(compute, numbers_corpus, tmp_path):
    folder = write_model(tmp_path / "bert", "bert")
    write_digits_tokenizer(folder)
    extraction = dataclasses.replace(EXTRACTION, num_windows=10**6)  # every window
    _, store = compute(folder, extraction)
    assert store.recipe.tokenizer_hash != numbers_corpus.tokenizer.sha256
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = open_domains(numbers_corpus).open("code", "train")
    windows = draw_windows(tokens.lengths, WINDOW, 10**6, seed=0, name="code")
    parts = split_at_documents(windows, tokens.lengths)
    digits = []
    for place in zip(parts.document, parts.start, parts.length, strict=True):
        words = [number for number in tokens.get(*map(int, place)).tolist() if number != EOD]
        digits += [DIGITS.index(digit) for digit in "".join(map(str, words))] or [0]
    rows = []
    for start in range(0, len(digits) - WINDOW + 1, WINDOW):
        ids = torch.tensor([[CLS, *digits[start : start + WINDOW], SEP]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[LAYER][0, 1:-1]
        rows.append(states.mean(0).numpy())
    found = store.vectors("code")
    assert found.shape == (len(rows), 32)

    def by_first(vectors):
        return vectors[np.argsort(vectors[:, 0])]

    np.testing.assert_allclose(by_first(found), by_first(np.stack(rows)), atol=1e-5)


def test_windows_of_a_document_are_joined(numbers_corpus, tmp_path):
    folder = write_model(tmp_path / "bert", "bert")
    write_digits_tokenizer(folder)
    proxy, tokens = open_proxy(folder), open_domains(numbers_corpus).open("news", "train")
    recipe = EmbeddingRecipe("m", LAYER, WINDOW, num_windows=2, seed=0, tokenizer_hash="t")
    windows = StoreEntry("news", "news", recipe, documents=range(5, 9)).windows(tokens)
    text = open_domains(numbers_corpus).encoded_for(proxy)
    assert text.is_reencoded
    encoded = text.encode_again(tokens, windows, by_document=True)
    assert len(encoded) == 4
    for number in range(4):
        own = sorted(np.flatnonzero(windows.document == 5 + number), key=windows.start.__getitem__)
        places = [(5 + number, int(windows.start[i]), int(windows.length[i])) for i in own]
        assert 1 <= len(places) <= 2
        digits = "".join(str(i) for place in places for i in tokens.get(*place) if i != EOD)
        assert encoded.get(number).tolist() == [DIGITS.index(digit) for digit in digits]


def test_sampled_text_of_another_tokenizer(compute, tmp_path):
    """A sample has the number of windows that was requested, and depends on the seed only."""
    folder = write_model(tmp_path / "bert", "bert")
    write_digits_tokenizer(folder)
    sampled = dataclasses.replace(EXTRACTION, num_windows=7)
    _, store = compute(folder, sampled)
    again = dataclasses.replace(sampled, embedding_batch_size=2)
    _, other = compute(folder, again, store=tmp_path / "again", domains="poems")
    other = EmbeddingStore.load(tmp_path / "again")
    assert {name: entry.windows for name, entry in store.domains.items()} == dict.fromkeys(
        DOMAINS, 7
    )
    np.testing.assert_allclose(other.vectors("poems"), store.vectors("poems"), atol=1e-6)
    assert {entry.tokens for entry in store.domains.values()} == {7 * WINDOW}


def test_a_model_on_the_hub(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "hub" / "someone" / "tiny", "llama")
    write_tokenizer(folder, WORDS)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "model.py").write_text("raise SystemExit")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve(tmp_path / "hub") as (address, requests):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        url = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        found = open_proxy(Path("someone/tiny"))
        assert found.hash == open_proxy(folder).hash
        assert not [each for each in requests if each.endswith((".bin", ".py"))]
        for name in ("someone/none", "someone/not--valid"):
            with pytest.raises(UserError, match=re.escape(name)) as error:
                open_proxy(Path(name))
            assert "\n" not in str(error.value)
    # The hub is not reachable any more, but the model is in the cache.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert open_proxy(Path("someone/tiny")) == found
    with pytest.raises(UserError, match="not reachable") as error:
        open_proxy(Path("someone/other"))
    assert "\n" not in str(error.value)
