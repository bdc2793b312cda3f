"""``--target``: from domain names or a text to the prior and the weights."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from megatron_chameleon.artifacts import CheckpointRecord, Corpus, Mixture, find_checkpoint
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer, recorded_tokenizer_file
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.methods.chameleon.options import (
    ChameleonOptions,
    ExtractionOptions,
    RecipeOptions,
)
from megatron_chameleon.methods.chameleon.target import parse_target, read_text
from megatron_chameleon.mixture import chameleon_weights, similarity_shares, target_prior
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus
from tests.unit.methods.chameleon_runs import means_of

WEIGHTING = RecipeOptions("reference", ridge=0.01, bootstrap_resamples=100)


@pytest.fixture(scope="module")
def spelled_corpus(tmp_path_factory):
    """The small corpus with a tokenizer whose text is the token ids, separated by spaces."""
    root = tmp_path_factory.mktemp("spelled")
    corpus = write_small_corpus(root)
    file = word_tokenizer(root / corpus.tokenizer.file)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(file))
    sha256 = recorded_tokenizer_file(file, corpus.tokenizer).sha256
    identity = dataclasses.replace(corpus.tokenizer, sha256=sha256)
    dataclasses.replace(corpus, tokenizer=identity).save()
    return Corpus.load(root)


@pytest.fixture(scope="module")
def inputs(spelled_corpus, finished_run, tmp_path_factory):
    """Corpus, proxy and an embedding store that the tests share."""
    folder = tmp_path_factory.mktemp("inputs")
    run = shutil.copytree(finished_run, folder / "run")
    record = CheckpointRecord.load(find_checkpoint(run))
    dataclasses.replace(record, tokenizer_hash=spelled_corpus.tokenizer.sha256).save()
    return {"corpus": spelled_corpus.root, "checkpoint": run, "store": folder / "embeddings"}


@pytest.fixture
def compute(inputs, tmp_path):
    """``compute(**changes)``: run the method and load its mixture."""

    def run(**changes):
        options = ChameleonOptions(
            **{
                **inputs,
                "output": tmp_path / "out" / "mixture.json",
                "extraction": ExtractionOptions(num_windows=60),
                "weighting": WEIGHTING,
                **changes,
            }
        )
        compute_mixture(options)
        return Mixture.load(options.output)

    return run


def texts_of(corpus: Corpus, name: str, count: int) -> list[str]:
    """The first training documents of a domain, as text."""
    tokens = open_tokens(corpus, name, "train")
    documents = [tokens.get(number)[:-1] for number in range(count)]
    return [" ".join(map(str, document.tolist())) for document in documents]


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_named_domains_determine_the_prior(compute, inputs, capsys, mode):
    plain = compute(mode=mode)
    mixture = compute(target="code=3, poems", target_strength=0.4, mode=mode)
    prior = target_prior([0, 3, 1], 0.4)
    means = means_of(inputs["store"])
    expected = chameleon_weights(means, mode, prior=prior, ridge=0.01, ridge_relative=False)
    assert list(mixture.weights.values()) == pytest.approx(expected.weights, rel=1e-9)
    assert max(abs(mixture.weights[name] - plain.weights[name]) for name in DOMAINS) > 0.01
    assert mixture.parameters["target"] == {
        "given": "code=3, poems",
        "strength": 0.4,
        "prior": pytest.approx(dict(zip(DOMAINS, prior, strict=True))),
        "weights_without": plain.weights,
    }
    for name, (low, high) in mixture.intervals.items():
        assert low <= mixture.weights[name] <= high
    printed = capsys.readouterr().out
    assert "code=3, poems" in printed
    line = [line for line in printed.splitlines() if line.startswith("code ")][-1]
    weights = (each.weights["code"] for each in (plain, mixture))
    assert line.split()[3:6] == [f"{prior[1]:.2f}", *(f"{weight:.4f}" for weight in weights)]


def test_a_target_without_effect_raises_a_warning(compute):
    plain = compute()
    with pytest.warns(UserWarning, match="no effect"):
        equal = compute(target="news,code,poems")
    assert (equal.weights, equal.intervals) == (plain.weights, plain.intervals)
    assert set(equal.parameters["target"]["prior"].values()) == {1.0}
    with pytest.warns(UserWarning, match="smaller --ridge"):
        compute(target="news", weighting=dataclasses.replace(WEIGHTING, ridge=1e6))
    small = dataclasses.replace(WEIGHTING, ridge=1e-7, center=False)
    with pytest.warns(UserWarning, match="larger --ridge"):
        compute(target="news", weighting=small, mode="finetune")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(target="news")


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_text_upweights_the_domain_that_it_resembles(compute, spelled_corpus, tmp_path, suffix):
    texts = texts_of(spelled_corpus, "code", 30)
    path = tmp_path / f"task{suffix}"
    lines = texts if suffix == ".txt" else [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join([*lines, ""]))
    mixture = compute(target=str(path))
    target = mixture.parameters["target"]
    assert max(target["prior"], key=target["prior"].get) == "code"
    assert target["prior"]["code"] > 1.2
    assert target["windows"] > 30
    assert mixture.weights["code"] > target["weights_without"]["code"]
    assert len(mixture.provenance.inputs["target text"]) == 64
    assert mixture.cost.flops > 0  # of the text, which is not in the store


def test_a_text_is_embedded_like_a_domain(compute, spelled_corpus, tmp_path):
    path = tmp_path / "all.jsonl"
    texts = texts_of(spelled_corpus, "poems", spelled_corpus.domains["poems"].train.documents)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    every = ExtractionOptions(num_windows=10**6)
    mixture = compute(target=str(path), extraction=every, store=tmp_path / "store")
    means = means_of(tmp_path / "store")
    expected = target_prior(similarity_shares(means, means[2]), 0.5)
    prior = list(mixture.parameters["target"]["prior"].values())
    assert prior == pytest.approx(expected, rel=1e-4)


def test_a_text_is_tokenized_like_the_corpus(spelled_corpus, tmp_path):
    texts = texts_of(spelled_corpus, "news", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text}) for text in [*texts, ""]))
    tokens = read_text(path, spelled_corpus)
    original = open_tokens(spelled_corpus, "news", "train")
    assert len(tokens) == 3  # empty documents are skipped
    for number in range(3):
        np.testing.assert_array_equal(tokens.get(number), original.get(number))
        start = tokens.starts[number]
        part = tokens.tokens[start : start + tokens.lengths[number]]
        np.testing.assert_array_equal(part, original.get(number))
    assert tokens.dtype == corpus_tokenizer(spelled_corpus).token_type


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("prose", "'prose'"),
        ("news,news", "'news'"),
        ("news=0", "'0'"),
        ("news=many", "'many'"),
        ("news=nan", "'nan'"),
        (" , ", "--target"),
        ("nowhere.txt", "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line(value, named):
    with pytest.raises(UserError, match=re.escape(named)) as error:
        parse_target(value, None, DOMAINS)
    assert "\n" not in str(error.value)


def test_a_mistake_writes_nothing(compute, tmp_path):
    with pytest.raises(UserError, match="'poems'"):
        compute(target="poems", domains="news,code")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\n\n", "no text"),
        (b'{"text": "1 2"}\n[1]\n', "line 2"),
        (b'{"body": "1 2"}\n', "line 1"),
        (b'{"text": 3}\n', "line 1"),
        (b"caf\xe9", "a.jsonl"),
    ],
)
def test_a_malformed_text_is_one_line(spelled_corpus, tmp_path, content, named):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=named) as error:
        read_text(path, spelled_corpus)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "shares"), [("a.txt", {"a.txt": 1.0}), ("b=2,a.txt=3", {"b=2": 1.0, "a.txt": 3.0})]
)
def test_a_domain_name_may_look_like_a_file_or_a_share(value, shares):
    target = parse_target(value, None, ["a.txt", "b=2"])
    assert target is not None
    assert target.shares == shares


def test_explain_changes_nothing_stored_even_of_a_single_domain(compute, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("1 2 3")
    for mode in ("pretrain", "finetune"):
        with pytest.warns(UserWarning, match="no effect"):
            mixture = compute(domains="news", target=str(text), mode=mode, explain=True)
        assert mixture.weights == {"news": 1.0}
        assert mixture.intervals == {"news": (1.0, 1.0)}
    plain = compute(target="news")
    explained = compute(target="news", explain=True)
    assert "SIMILARITY" in capsys.readouterr().out
    changing = {"cost": None, "provenance": None}
    assert dataclasses.replace(plain, **changing) == dataclasses.replace(explained, **changing)
