"""Subsets of a number of tokens, compared with the corpus of all text."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus import join, shards
from megatron_chameleon.corpus.options import DomainOptions, PreprocessOptions
from megatron_chameleon.corpus.shards import assign_splits, text_digest
from megatron_chameleon.corpus.staging import CorpusFolder
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import (
    assert_same,
    documents_of,
    make_corpus,
    source_options,
)

BUDGETS = {"a": 1500, "b": 600, "c": 900}


@pytest.fixture
def stream(texts):
    """(domain, text) of all documents: repeated and empty texts, and texts held out elsewhere."""
    some = texts(500, 1)
    found = [("abc"[i % 3], text) for i, text in enumerate(some)]
    repeated = [("a", text) for _, text in found[:30] for _ in range(4)]
    return [*found[:20], ("b", ""), ("a", ""), *found[20:40], *repeated, *found[40:]]


@pytest.fixture
def mixture(tmp_path):
    path = tmp_path / "mixture.json"
    total = sum(BUDGETS.values())
    weights = {name: budget / total for name, budget in BUDGETS.items()}
    path.write_text(json.dumps({"weights": {**weights, "never": 0.0}}))
    return path


@pytest.fixture(params=["named", "key"])
def whole(request, stream, jsonl, texts, tokenizer_json, tmp_path):
    """Options without a budget: domains by name, one of them compressed, or by the records.

    Some text of a is in a held-out domain, and the file of --test-input has texts of b.
    """
    held_out = [*texts(40, 2), *(text for name, text in stream if name == "a")][:55]
    test = [text for name, text in stream if name == "b"][3:6]
    held = ((f"h={jsonl('h.jsonl', held_out)}",),)
    if request.param == "key":
        lines = [{"text": text, "set": name} for name, text in stream]
        never = [{"text": text, "set": "never"} for text in texts(20, 3)]
        source = source_options(jsonl("all.jsonl", [*lines[:50], *never, *lines[50:]]))
        tests = jsonl("test.jsonl", [{"text": text, "set": "b"} for text in test])
        domains = DomainOptions(domain_key="set", test_input=((f"{tests}",),), held_out=held)
    else:
        files = {
            name: jsonl(f"{name}.jsonl", [t for n, t in stream if n == name]) for name in "abc"
        }
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(files["c"].read_bytes()))
        inputs = [f"a={files['a']}", f"b={files['b']}", f"c={tmp_path / 'c.jsonl.gz'}"]
        source = source_options(*inputs, f"never={jsonl('n.jsonl', texts(20, 3))}")
        domains = DomainOptions(test_input=((f"b={jsonl('test.jsonl', test)}",),), held_out=held)
    return PreprocessOptions(
        source, tmp_path / "whole", tokenizer_json, domains, split="60,20,20", workers=1
    )


def subset_reference(whole, full, stream, drop):
    """Domain -> split -> texts: document by document, up to the one that reaches the budget."""
    encode = corpus_tokenizer(full).encode_documents
    subset = {}
    for name, budget in BUDGETS.items():
        of_full = {split: documents_of(full, name, split) for split in SPLITS}
        found: dict[str, list[str]] = {split: [] for split in SPLITS}
        tokens = 0
        for text in (text for domain, text in stream if domain == name):
            head = np.frombuffer(text_digest(text.encode())[:8], ">u8").astype(np.uint64)
            split = SPLITS[assign_splits(head, whole.split_shares)[0]]
            if text not in of_full[split] or (drop and text in found[split]):
                continue
            found[split].append(text)
            tokens += len(encode([text])[0]) if split == "train" else 0
            if tokens >= budget:
                break
        if name == "b":  # all of --test-input
            by_source = [text for domain, text in stream if domain == "b"][3:6]
            found["test"] += [t for t in by_source if not (drop and t in found["test"])]
        subset[name] = found
    return subset


def subset_of(options, mixture, output, **changes):
    changes = {"max_tokens": sum(BUDGETS.values()), "mixture": str(mixture), **changes}
    return replace(options, output=output, **changes)


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
@pytest.mark.parametrize("drop", [True, False])
def test_a_subset_is_the_beginning_of_each_domain(
    whole, mixture, stream, tmp_path, monkeypatch, drop
):
    """It does not depend on shards and batches, and trains on no other valid or test text."""
    whole = replace(whole, drop_duplicates=drop)
    full = make_corpus(whole)
    expected = subset_reference(whole, full, stream, drop)
    monkeypatch.setattr(join, "_BLOCK_DOCUMENTS", 7)
    made = []
    for shard_bytes, batch in ((10**9, 1 << 21), (10**9, 400), (3000, 400), (9000, 1 << 21)):
        monkeypatch.setattr(shards, "_BATCH_CHARACTERS", batch)
        output = tmp_path / f"{shard_bytes}-{batch}"
        options = subset_of(whole, mixture, output, shard_bytes=shard_bytes)
        corpus = make_corpus(options)
        corpus.verify()
        assert list(corpus.domains) == list(BUDGETS)
        assert corpus.max_tokens == BUDGETS
        for name in BUDGETS:
            found = {split: documents_of(corpus, name, split) for split in SPLITS}
            assert found == expected[name]
            assert len(found["valid"]) < len(documents_of(full, name, "valid"))
        assert corpus.domain_hash("h") == full.domain_hash("h")
        made.append(corpus)
        assert (corpus.domains, corpus.not_written) == (made[0].domains, made[0].not_written)
    counts = made[0].not_written
    assert counts["a"].duplicates > 10
    assert counts["a"].held_out > 5
    assert (counts["a"].empty, counts["b"].empty) == (1, 1)


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
def test_workers_and_interruptions_do_not_change_a_subset(whole, mixture, tmp_path, monkeypatch):
    """It is interrupted when shards are made, and when they are removed to be made again."""
    options = subset_of(whole, mixture, tmp_path / "once", shard_bytes=9000)
    expected = make_corpus(options)
    assert_same(make_corpus(replace(options, output=tmp_path / "two", workers=2)), expected)
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 400)
    expected = make_corpus(replace(options, output=tmp_path / "small batches"))
    events: list[tuple[str, int]] = []

    def interrupt_after(name):
        original = getattr(CorpusFolder, name)

        def interrupted(self, *arguments):
            original(self, *arguments)
            events.append((name, arguments[-1]))
            if len(events) == most:
                raise KeyboardInterrupt

        monkeypatch.setattr(CorpusFolder, name, interrupted)

    interrupt_after("put_shard")
    interrupt_after("remove_shard")
    interrupted_after = set()
    for most in range(1, 100):
        events.clear()
        again = replace(options, output=tmp_path / f"{most}")
        try:
            make_corpus(again)
        except KeyboardInterrupt:
            interrupted_after.add(events[-1][0])
            assert_same(make_corpus(again), expected)
        else:
            break
    assert interrupted_after == {"put_shard", "remove_shard"}


def test_a_domain_with_too_little_text_is_used_completely_and_reported(
    jsonl, texts, tokenizer_json, tmp_path
):
    """The shares are equal without a mixture."""
    inputs = [
        f"{name}={jsonl(f'{name}.jsonl', texts(n, n))}" for name, n in (("a", 60), ("b", 400))
    ]
    options = PreprocessOptions(
        source_options(*inputs), tmp_path / "whole", tokenizer_json, split="60,20,20", workers=1
    )
    full = make_corpus(options)
    with pytest.warns(UserWarning, match="'a'"):
        corpus = make_corpus(replace(options, output=tmp_path / "subset", max_tokens=8000))
    assert corpus.max_tokens == {"a": 4000, "b": 4000}
    assert corpus.domain_hash("a") == full.domain_hash("a")
    assert full.train_tokens["a"] < 4000 <= corpus.train_tokens["b"] < full.train_tokens["b"]


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
def test_options_without_a_meaning_together_are_errors(
    jsonl, texts, tokenizer_json, tmp_path, mixture
):
    options = PreprocessOptions(
        source_options(jsonl("a.jsonl", [{"text": text, "set": "a"} for text in texts(40)])),
        tmp_path / "corpus",
        tokenizer_json,
        DomainOptions(domain_key="set"),
        split="60,20,20",
        workers=1,
    )
    with pytest.raises(UserError, match="--mixture"):
        replace(options, mixture=str(mixture))
    with pytest.raises(UserError, match="--shard"):
        replace(options, max_tokens=100, shard="1/2")
    with pytest.raises(UserError, match="--domain-key"):
        make_corpus(replace(options, max_tokens=100))
    with pytest.raises(UserError, match="'b', 'c'"):
        make_corpus(replace(options, max_tokens=100, mixture=str(mixture)))
