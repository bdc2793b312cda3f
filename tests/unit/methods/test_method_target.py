"""``--target``: from the option to the weights, by name and by text."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    EmbeddingStore,
    Mixture,
    find_checkpoint,
)
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer, recorded_tokenizer_file
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.methods.leverage.target import resolve_target
from megatron_chameleon.methods.leverage.target_text import read_target
from megatron_chameleon.mixture import chameleon_weights, similarity_shares, target_prior
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus

WEIGHTING = RecipeOptions("reference", ridge=0.01, bootstrap_resamples=100)


@pytest.fixture(scope="module")
def spelt_corpus(tmp_path_factory):
    """The small corpus with a tokenizer that reads its tokens as numbers between spaces."""
    root = tmp_path_factory.mktemp("spelt")
    corpus = write_small_corpus(root)
    file = word_tokenizer(root / corpus.tokenizer.file)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(file))
    sha256 = recorded_tokenizer_file(file, corpus.tokenizer).sha256
    identity = dataclasses.replace(corpus.tokenizer, sha256=sha256)
    dataclasses.replace(corpus, tokenizer=identity).save()
    return Corpus.load(root)


@pytest.fixture
def compute(spelt_corpus, trained_run, tmp_path):
    """``compute(**changes)``: run the tool on that corpus and read what it wrote."""
    record = CheckpointRecord.load(find_checkpoint(trained_run))
    dataclasses.replace(record, tokenizer_hash=spelt_corpus.tokenizer.sha256).save()

    def run(**changes):
        options = ChameleonOptions(
            corpus=spelt_corpus.root,
            checkpoint=trained_run,
            output=tmp_path / "out" / "mixture.json",
            extraction=ExtractionOptions(num_windows=60),
            weighting=WEIGHTING,
        )
        compute_mixture(dataclasses.replace(options, **changes))
        return Mixture.load(options.output)

    return run


def texts_of(corpus: Corpus, name: str, count: int) -> list[str]:
    """The first documents of a domain, as the corpus's tokenizer reads them."""
    tokens = open_tokens(corpus, name, "train")
    documents = [tokens.get(number)[:-1] for number in range(count)]
    return [" ".join(map(str, document.tolist())) for document in documents]


def means(folder: Path) -> np.ndarray:
    store = EmbeddingStore.load(folder / "out" / "embeddings")
    return np.stack([store.vectors(name).astype(np.float64).mean(axis=0) for name in DOMAINS])


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_named_domains_give_the_prior_and_its_weights(compute, tmp_path, capsys, mode):
    mixture = compute(target="code=3, poems", target_strength=0.4, mode=mode)
    prior = target_prior([0, 3, 1], 0.4)
    options: dict[str, Any] = {"ridge": 0.01, "ridge_relative": False}
    expected = chameleon_weights(means(tmp_path), mode, prior=prior, **options)
    plain = chameleon_weights(means(tmp_path), mode, **options).weights
    assert list(mixture.weights.values()) == pytest.approx(expected.weights, rel=1e-9)
    assert np.abs(expected.weights - plain).max() > 0.01
    asked = mixture.parameters["target"]
    assert asked["given"] == "code=3, poems"
    assert asked["strength"] == 0.4
    assert asked["prior"] == pytest.approx(dict(zip(DOMAINS, prior, strict=True)))
    assert asked["weights_without"] == pytest.approx(dict(zip(DOMAINS, plain, strict=True)))
    printed = capsys.readouterr().out
    assert "towards code=3, poems, with strength 0.4" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("code ")]
    assert line.split()[3:6] == [f"{prior[1]:.2f}", f"{plain[1]:.4f}", f"{expected.weights[1]:.4f}"]


def test_intervals_are_those_of_the_targets_weights(compute):
    towards, plain = compute(target="news"), compute()
    for name, (low, high) in towards.intervals.items():
        assert low <= towards.weights[name] <= high
    assert plain.weights["news"] < towards.intervals["news"][0]


def test_equal_shares_are_no_target_and_it_is_said(compute):
    plain = compute()
    with pytest.warns(UserWarning, match="--target counts all domains alike"):
        same = compute(target="news,code,poems")
    assert same.weights == plain.weights
    assert same.intervals == plain.intervals
    assert set(same.parameters["target"]["prior"].values()) == {1.0}


def test_a_target_that_the_ridge_drowns_is_called_out(compute):
    far = dataclasses.replace(WEIGHTING, ridge=1e6)
    with pytest.warns(UserWarning, match=r"hardly moves .* at a smaller --ridge, or with --recipe"):
        compute(target="news", weighting=far)
    near = dataclasses.replace(WEIGHTING, ridge=1e-7, center=False)
    with pytest.warns(UserWarning, match="hardly moves .* at a larger --ridge"):
        compute(target="news", weighting=near, mode="finetune")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(target="news")


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_text_counts_the_domain_it_is_like(compute, spelt_corpus, tmp_path, suffix):
    texts = texts_of(spelt_corpus, "code", 30)
    path = tmp_path / f"task{suffix}"
    lines = texts if suffix == ".txt" else [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join([*lines, ""]))
    mixture = compute(target=str(path))
    prior = mixture.parameters["target"]["prior"]
    assert max(prior, key=prior.__getitem__) == "code"
    assert prior["code"] > 1.2
    assert mixture.parameters["target"]["windows"] > 30
    assert mixture.weights["code"] > mixture.parameters["target"]["weights_without"]["code"]
    assert len(mixture.provenance.inputs["target text"]) == 64
    assert mixture.cost.flops > 0  # of embedding the text, which the store does not hold
    assert compute().cost.flops == 0


def test_a_text_is_embedded_as_the_domains_are(compute, spelt_corpus, tmp_path):
    """A whole domain as the text: its embedding is that of the domain, but for which windows."""
    path = tmp_path / "all.jsonl"
    texts = texts_of(spelt_corpus, "poems", spelt_corpus.domains["poems"].train.documents)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    every = ExtractionOptions(num_windows=10**6)
    mixture = compute(target=str(path), extraction=every)
    found = means(tmp_path)
    expected = target_prior(similarity_shares(found, found[2]), 0.5)
    assert list(mixture.parameters["target"]["prior"].values()) == pytest.approx(expected, rel=1e-4)


def test_a_text_has_the_tokens_of_the_corpuss_tokenizer(spelt_corpus, tmp_path):
    texts = texts_of(spelt_corpus, "news", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text}) for text in [*texts, ""]))
    tokens = read_target(path, spelt_corpus)
    original = open_tokens(spelt_corpus, "news", "train")
    assert len(tokens) == 3  # an empty one is none
    for number in range(3):
        np.testing.assert_array_equal(tokens.get(number), original.get(number))
        start = tokens.starts[number]
        part = tokens.tokens[start : start + tokens.lengths[number]]
        np.testing.assert_array_equal(part, original.get(number))
    assert tokens.dtype == corpus_tokenizer(spelt_corpus).token_type


MISTAKES = [
    (
        "prose",
        None,
        "--target prose: there is no domain 'prose' among those that are weighed, news",
    ),
    ("news,news", None, "domain 'news' is there twice"),
    ("news=0", None, "the share '0' of 'news' is not a finite number above 0"),
    ("news=many", None, "the share 'many' of 'news'"),
    ("news=nan", None, "the share 'nan' of 'news'"),
    (" , ", None, "it names no domain; those are news, code, poems"),
    ("nowhere.txt", None, r"--target nowhere\.txt: there is no such file"),
    ("news", 0.0, "--target-strength 0"),
    ("news", 1.0, "--target-strength 1"),
    ("news", float("nan"), "--target-strength nan: "),
    (None, 0.5, r"--target-strength 0\.5 is that of a --target: give one too"),
]


@pytest.mark.parametrize(("given", "strength", "problem"), MISTAKES)
def test_a_mistake_has_one_clear_line(given, strength, problem):
    with pytest.raises(UserError, match=problem) as refused:
        resolve_target(given, strength, DOMAINS)
    assert "\n" not in str(refused.value)


def test_a_mistake_writes_nothing(compute, tmp_path):
    with pytest.raises(UserError, match="there is no domain 'poems' among"):
        compute(target="poems", domains="news,code")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it holds no text"),
        (b"\n\n", "it holds no text"),
        (b'{"text": "1 2"}\n[1]\n', "line 2 is not a JSON object"),
        (b'{"body": "1 2"}\n', "line 1 .*text"),
        (b'{"text": 3}\n', "line 1 has .* at 'text', not a string"),
    ],
)
def test_a_text_that_is_none_is_refused(spelt_corpus, tmp_path, content, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem) as refused:
        read_target(path, spelt_corpus)
    assert "\n" not in str(refused.value)


def test_a_text_that_is_not_utf_8_is_refused(spelt_corpus, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        read_target(path, spelt_corpus)


def test_a_domain_may_be_called_like_a_file_or_hold_an_equals_sign():
    names = ["a.txt", "b=2"]
    for given, shares in [("a.txt", {"a.txt": 1.0}), ("b=2,a.txt=3", {"b=2": 1.0, "a.txt": 3.0})]:
        target = resolve_target(given, None, names)
        assert target is not None
        assert target.shares == shares
    assert resolve_target(None, None, names) is None


def test_one_domain_alone_has_all_the_weight_whatever_it_is_for(compute, tmp_path):
    texts = tmp_path / "a.txt"
    texts.write_text("1 2 3")
    for mode in ("pretrain", "finetune"):
        with pytest.warns(UserWarning, match="counts all domains alike"):
            mixture = compute(domains="news", target=str(texts), mode=mode, explain=True)
        assert mixture.weights == {"news": 1.0}
        assert mixture.intervals == {"news": (1.0, 1.0)}


def test_explain_prints_more_and_stores_the_same(compute, capsys):
    plain = compute(target="news")
    capsys.readouterr()
    explained = compute(target="news", explain=True)
    printed = capsys.readouterr().out
    for title in ("HOW ALIKE", "SCORES", "KNOBS", "as it is", "half win."):
        assert title in printed
    before, after = (
        {key: value for key, value in dataclasses.asdict(mixture).items() if key != "cost"}
        for mixture in (plain, explained)
    )
    for made in (before, after):
        made["provenance"] = None
    assert before == after
