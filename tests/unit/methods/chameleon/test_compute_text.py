"""Chameleon weights from raw text: what is sampled, embedded, reused and rejected."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from megatron_chameleon.artifacts import SPLITS, Corpus, EmbeddingStore, Mixture
from megatron_chameleon.cli import parse_options
from megatron_chameleon.corpus import domains as domains_module
from megatron_chameleon.corpus import sample as sample_module
from megatron_chameleon.corpus.domains import RawText
from megatron_chameleon.corpus.encode import encoded_documents
from megatron_chameleon.corpus.options import DomainOptions, PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.sources import Source
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import (
    ChameleonOptions,
    ExtractionOptions,
    WeightingOptions,
)
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from tests.fixtures.task_data import Words
from tests.text_checkpoint import write_text_checkpoint

NAMES = ("web", "code", "wiki")
EXTRACTION = ExtractionOptions(num_windows=60, window_length=32)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    return write_text_checkpoint(tmp_path_factory.mktemp("proxy"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Domain -> a file of documents of very different lengths."""
    folder, lengths = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    found = {}
    for name in NAMES:
        words, found[name] = Words(name), folder / f"{name}.jsonl"
        lines = [json.dumps({"text": words.text(int(n))}) for n in lengths.integers(1, 12, 100)]
        found[name].write_text("".join(f"{line}\n" for line in lines))
    return found


@pytest.fixture
def compute(proxy, tmp_path):
    """``compute(inputs, **changes)``: run the method; return its mixture and its store."""

    def run(inputs, **changes):
        values = {
            "checkpoint": proxy.checkpoint,
            "source": source_of(inputs),
            "output": tmp_path / "out" / "mixture.json",
            "extraction": EXTRACTION,
            "weighting": WeightingOptions("scaled", bootstrap_resamples=20),
            **changes,
        }
        options = ChameleonOptions(**values)
        compute_mixture(options)
        store = EmbeddingStore.load(options.output.parent / "embeddings")
        return Mixture.load(options.output), store

    return run


def source_of(files):
    return SourceOptions((tuple(f"{name}={file}" for name, file in files.items()),))


def of_corpus(files, proxy, folder):
    """Preprocess all text of ``files`` to training text, with a held-out document each.

    Returns:
        Options with which ``compute`` reads this corpus.
    """
    held_out: dict[str, Any] = {}
    corpus = folder / "corpus"
    for split in ("valid", "test"):
        for name in files:
            (folder / f"{name}-{split}.jsonl").write_text(f'{{"text": "{split} of {name}"}}')
        paths = tuple(f"{name}={folder / name}-{split}.jsonl" for name in files)
        held_out[f"{split}_input"] = (paths,)
    domains = DomainOptions(**held_out)
    preprocess_data(
        PreprocessOptions(source_of(files), corpus, proxy.tokenizer, domains, workers=1)
    )
    output = folder / "corpus-out" / "mixture.json"
    return {"corpus": corpus, "source": SourceOptions(()), "output": output}


def vectors(store):
    return {name: store.vectors(name) for name in store.domains}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_text_that_is_read_completely_gives_the_vectors_of_its_corpus(
    compute, files, proxy, tmp_path, monkeypatch
):
    # Otherwise long documents would be cut into excerpts.
    monkeypatch.setattr(domains_module, "_CHARACTERS_PER_TOKEN", 1000)
    mixture, store = compute(files)
    from_corpus, its_store = compute(files, **of_corpus(files, proxy, tmp_path))
    assert_equal(vectors(store), vectors(its_store))
    assert mixture.weights == from_corpus.weights
    assert mixture.intervals == from_corpus.intervals


def test_a_sample_gives_the_vectors_of_the_corpus_of_the_sampled_text(
    compute, files, proxy, tmp_path, monkeypatch
):
    monkeypatch.setattr(sample_module, "_FINE", (10, 1 << 10))
    encoded = {}

    def recorded(path, encoder, texts):
        encoded[path.name] = texts
        return encoded_documents(path, encoder, texts)

    monkeypatch.setattr(domains_module, "encoded_documents", recorded)
    _, store = compute(files)
    sampled = {}
    for name, texts in encoded.items():
        everything = files[name].read_text()
        assert all(json.dumps(text)[1:-1] in everything for text in texts)
        assert sum(map(len, texts)) < 0.5 * len(everything)
        sampled[name] = tmp_path / f"sampled-{name}.jsonl"
        sampled[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, of_sample = compute(files, **of_corpus(sampled, proxy, tmp_path))
    assert_equal(vectors(store), vectors(of_sample))
    # The sample depends on the seed only.
    again, other = (
        compute(
            files,
            extraction=dataclasses.replace(EXTRACTION, extraction_seed=seed),
            output=tmp_path / f"seed-{seed}" / "mixture.json",
        )[1]
        for seed in (0, 1)
    )
    assert_equal(vectors(store), vectors(again))
    assert not np.array_equal(store.vectors("web").mean(0), other.vectors("web").mean(0))


def test_the_printed_command_makes_a_corpus_of_folders_of_text(compute, proxy, tmp_path, capsys):
    inputs = {name: tmp_path / f"my {name}" for name in ("web", "code")}
    for name, folder in inputs.items():
        text = Words(name)
        for number in range(80):
            file = folder / "below" / f"{number}{('.txt', '.md', '.py', '.rst', '.c')[number % 5]}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.text(8))
    mixture, _ = compute(inputs)
    printed = capsys.readouterr().out
    assert str(tmp_path / "out" / "embeddings") in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("next: "))
    words = shlex.split(line)
    assert words[1:3] == ["megatron-chameleon", "preprocess_data"]
    values = {"TOKENIZER": str(proxy.tokenizer), "CORPUS": str(tmp_path / "corpus")}
    options = parse_options(PreprocessOptions, [values.get(word, word) for word in words[3:]])
    preprocess_data(dataclasses.replace(options, workers=1, split="60,20,20"))
    corpus = Corpus.load(tmp_path / "corpus")
    assert corpus.names == list(mixture.weights)
    documents = [sum(d.split(s).documents for s in SPLITS) for d in corpus.domains.values()]
    assert documents == [80, 80]


def test_only_new_and_changed_text_is_read(compute, files, tmp_path, monkeypatch):
    read, sample = [], RawText.open

    def recorded(self, name, split=None):
        read.append(name)
        return sample(self, name, split)

    monkeypatch.setattr(RawText, "open", recorded)
    copies = {name: tmp_path / file.name for name, file in files.items()}
    for name, file in files.items():
        copies[name].write_bytes(file.read_bytes())
    two = {name: copies[name] for name in NAMES[:2]}
    compute(two)
    assert read == list(NAMES[:2])
    compute(copies)
    assert read == list(NAMES)
    mixture, _ = compute(copies)
    assert read == list(NAMES)
    os.utime(copies["code"])
    assert compute(copies)[0].weights == mixture.weights
    assert read == [*NAMES, "code"]


def sampled_text(source):
    return RawText(SourceOptions(()), {"web": [source]})


def test_a_changed_source_is_other_text(tmp_path):
    source = Source("web", "lines", "https://host/a.jsonl", bytes=9, etag="1")
    other = dataclasses.replace(source, etag="2")
    assert sampled_text(source).hash == sampled_text(source).hash != sampled_text(other).hash
    (tmp_path / "a.csv").write_text("text\na\n")
    text = sampled_text(Source("web", "dataset", f"hf:{tmp_path}"))
    before = text.domain_hash("web")
    assert text.domain_hash("web") == before
    (tmp_path / "a.csv").write_text("text\nab\n")
    assert text.domain_hash("web") != before


def test_text_is_reported_and_a_blend_of_names_is_written(compute, files, tmp_path, capsys):
    mixture, _ = compute(files, target="web")
    printed = capsys.readouterr().out
    assert "web 100 documents (" in printed
    names, weights = json.loads((tmp_path / "out" / "mixture.bridge.json").read_text())["blend"]
    assert dict(zip(names, weights, strict=True)) == mixture.weights
    line = " ".join(f"{weight!r} {name}" for name, weight in mixture.weights.items())
    assert f"--data-path {line} " in printed
    assert "text" in mixture.provenance.inputs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --corpus, or --input"),
        (["--input", "web={web}", "--corpus", "c"], "either --corpus, or --input"),
        (["--corpus", "c", "--text-key", "x"], "--text-key x: applies only to --input"),
        (
            ["--input", "web={web}", "--token-budget", "9"],
            "--token-budget 9: requires token counts",
        ),
        (["--input", "{web}"], "has no domain; pass it as NAME=PATH"),
        (["--input", "web={web}", "code={empty}"], "'code' has no text"),
        (["--input", "web={web}", "--text-key", "content"], "no key 'content'"),
        (["--input", "web={web}", "--domains", "code"], "unknown domain 'code'; --input has web"),
        (["--input", "web=hf:o/n"], "cannot reach http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_reported_in_one_line_and_write_nothing(
    arguments, message, files, proxy, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "empty.jsonl").touch()
    paths = {"web": files["web"], "empty": tmp_path / "empty.jsonl"}
    output = ["--checkpoint", str(proxy.checkpoint), "--output", f"{tmp_path}/out/mixture.json"]
    small = ["--num-windows", "8", "--window-length", "16"]
    argv = [*(argument.format(**paths) for argument in arguments), *output, *small]
    with pytest.raises((UserError, SystemExit)) as caught:
        compute_mixture(parse_options(ChameleonOptions, argv))
    found = capsys.readouterr().err if caught.type is SystemExit else str(caught.value)
    assert message in found
    assert "\n" not in found.strip()
    assert not (tmp_path / "out").exists()
