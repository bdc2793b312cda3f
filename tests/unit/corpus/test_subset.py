"""Subsets of a number of tokens, compared with the corpus of all text."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus import join, preprocess, shards
from megatron_chameleon.corpus.options import DomainOptions
from megatron_chameleon.corpus.shards import assign_splits, text_digest
from megatron_chameleon.corpus.staging import CorpusFolder
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import assert_same, documents_of, make_corpus

BY_SET = DomainOptions(domain_key="set")
BUDGETS = {"a": 1500, "b": 600, "c": 900, "d": 700}


@pytest.fixture
def stream(texts):
    """(domain, text) of all documents: repeated and empty texts, and texts held out elsewhere.

    Some texts of d are far behind in a.
    """
    some = texts(500, 1)
    found = [("abcd"[i % 4], text) for i, text in enumerate(some)]
    repeated = [("a", text) for _, text in found[:30] for _ in range(4)]
    shared = [("d", text) for name, text in found[300:] if name == "a"]
    return [*found[:20], ("b", ""), ("a", ""), *found[20:40], *repeated, *shared, *found[40:]]


def texts_of(stream, name):
    return [text for domain, text in stream if domain == name]


def by_source_of_b(stream):
    """Texts of --test-input: the domain has the last one by hash, too, beyond its budget."""
    own = [text for text in texts_of(stream, "b") if text]
    return [*own[3:6], next(text for text in own[::-1] if split_of(text) == "test")]


def split_of(text):
    head = np.frombuffer(text_digest(text.encode())[:8], ">u8").astype(np.uint64)
    return SPLITS[assign_splits(head, (0.6, 0.2, 0.2))[0]]


@pytest.fixture
def mixture(tmp_path):
    path = tmp_path / "mixture.json"
    total = sum(BUDGETS.values())
    weights = {name: budget / total for name, budget in BUDGETS.items()}
    path.write_text(json.dumps({"weights": {**weights, "never": 0.0}}))
    return path


@pytest.fixture
def whole(request, stream, jsonl, texts, preprocessing, tmp_path):
    """Options without a budget: domains by name, one of them compressed, or by the records ("key").

    Some text of a is in a held-out domain, and in the test text of a domain without a weight. The
    file of --test-input has texts of b. If domains have names, a source defines all splits of d.
    """
    held_out = [*texts(40, 2), *texts_of(stream, "a")][:55]
    held = ((f"h={jsonl('h.jsonl', held_out)}",),)
    tests = {"b": by_source_of_b(stream), "never": texts_of(stream, "a")[10:30]}
    if request.param == "key":
        lines = [{"text": text, "set": name} for name, text in stream]
        never = [{"text": text, "set": "never"} for text in texts(20, 3)]
        inputs = [jsonl("all.jsonl", [*lines[:50], *never, *lines[50:]])]
        test_lines = [{"text": t, "set": name} for name, some in tests.items() for t in some]
        test_input: tuple[str, ...] = (str(jsonl("test.jsonl", test_lines)),)
        domains = DomainOptions(domain_key="set", test_input=(test_input,), held_out=held)
    else:
        files = {name: jsonl(f"{name}.jsonl", texts_of(stream, name)) for name in BUDGETS}
        files["never"] = jsonl("never.jsonl", texts(20, 3))
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(files["c"].read_bytes()))
        files["c"] = tmp_path / "c.jsonl.gz"
        tests["d"] = texts(9, 4)
        test_input = tuple(f"{n}={jsonl(f'test-{n}.jsonl', some)}" for n, some in tests.items())
        valid_input = (f"d={jsonl('valid.jsonl', texts(9, 5))}",)
        inputs = [f"{name}={path}" for name, path in files.items()]
        domains = DomainOptions(valid_input=(valid_input,), test_input=(test_input,), held_out=held)
    return preprocessing(*inputs, output="whole", domains=domains)


def subset_reference(full, stream, drop):
    """Domain -> split -> texts: document by document, up to the one that reaches the budget.

    Splits that a source defines come last.
    """
    encode = corpus_tokenizer(full).encode_documents
    subset = {}
    is_by_source = full.provenance.options["domains"].get("domain_key") is None
    for name, budget in BUDGETS.items():
        of_full = {split: documents_of(full, name, split) for split in SPLITS}
        found: dict[str, list[str]] = {split: [] for split in SPLITS}
        tokens = 0
        for text in texts_of(stream, name):
            split = split_of(text)
            if is_by_source and name == "d" and split != "train":
                continue  # other domains may have it in this split, beyond their budgets
            if text not in of_full[split] or (drop and text in found[split]):
                continue
            found[split].append(text)
            tokens += len(encode([text])[0]) if split == "train" else 0
            if tokens >= budget:
                break
        if name == "b":
            tests = by_source_of_b(stream)
            found["test"] = [t for t in found["test"] if not (drop and t in tests)] + tests
        if is_by_source and name == "d":
            found |= {"valid": of_full["valid"], "test": of_full["test"]}
        subset[name] = found
    return subset


def subset_of(options, mixture, output, **changes):
    changes = {"max_tokens": sum(BUDGETS.values()), "mixture": str(mixture), **changes}
    return replace(options, output=output, **changes)


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
@pytest.mark.parametrize(
    ("whole", "drop", "layouts"),
    [
        ("named", True, [(10**9, 1 << 21), (3000, 400), (1000, 1 << 21)]),
        ("named", False, [(9000, 400)]),
        ("key", True, [(10**9, 400), (9000, 1 << 21)]),
    ],
    indirect=["whole"],
)
def test_a_subset_is_the_beginning_of_each_domain(
    whole, mixture, stream, tmp_path, monkeypatch, drop, layouts
):
    """It does not depend on shards and batches, and trains on no other valid or test text."""
    whole = replace(whole, drop_duplicates=drop)
    full = make_corpus(whole)
    judged = {
        text
        for name in full.all_domains
        for split in SPLITS[1:]
        for text in documents_of(full, name, split)
    }
    expected = subset_reference(full, stream, drop)
    monkeypatch.setattr(join, "_BLOCK_DOCUMENTS", 7)
    made = []
    for shard_bytes, batch in layouts:
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
            assert judged.isdisjoint(found["train"])
            assert len(found["train"]) < len(documents_of(full, name, "train"))
        assert corpus.domain_hash("h") == full.domain_hash("h")
        made.append(corpus)
        assert (corpus.domains, corpus.not_written) == (made[0].domains, made[0].not_written)
    counts = made[0].not_written
    assert counts["a"].duplicates > 10
    assert counts["a"].held_out > 5
    assert (counts["a"].empty, counts["b"].empty) == (1, 1)


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
@pytest.mark.parametrize(
    ("whole", "interruptions"),
    [
        ("named", [1, 7, 14]),
        pytest.param("named", range(1, 100), marks=pytest.mark.slow),
        pytest.param("key", range(1, 100), marks=pytest.mark.slow),
    ],
    indirect=["whole"],
)
def test_workers_and_interruptions_do_not_change_a_subset(
    whole, mixture, tmp_path, monkeypatch, interruptions
):
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
    for most in interruptions:
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


def test_a_domain_with_too_little_text_is_used_completely_and_reported(jsonl, texts, preprocessing):
    """The shares are equal without a mixture."""
    inputs = [f"{x}={jsonl(f'{x}.jsonl', texts(n, n))}" for x, n in (("a", 60), ("b", 400))]
    full = make_corpus(preprocessing(*inputs))
    with pytest.warns(UserWarning, match="'a'"):
        corpus = make_corpus(preprocessing(*inputs, output="subset", max_tokens=8000))
    assert corpus.max_tokens == {"a": 4000, "b": 4000}
    assert corpus.domain_hash("a") == full.domain_hash("a")
    assert full.train_tokens["a"] < 4000 <= corpus.train_tokens["b"] < full.train_tokens["b"]


def test_a_touched_file_only_removes_its_own_shards(
    jsonl, texts, preprocessing, tmp_path, monkeypatch, capsys
):
    files = [jsonl(f"{name}.jsonl", texts(400, 1)) for name in "ab"]
    inputs, size = [f"{path.stem}={path}" for path in files], files[0].stat().st_size
    options = preprocessing(*inputs, max_tokens=3000, shard_bytes=size)
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 400)
    expected = make_corpus(replace(options, output=tmp_path / "once"))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(preprocess, "join_shards", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_corpus(options)
    os.utime(files[0], (1, 1))
    capsys.readouterr()
    assert_same(make_corpus(options), expected)
    assert "; 1 of 2 shards were finished before" in capsys.readouterr().out


def test_documents_of_domains_without_a_weight_are_counted(jsonl, texts, preprocessing, tmp_path):
    lines = [{"text": text, "set": "ab"[i % 2]} for i, text in enumerate(texts(80))]
    (tmp_path / "m.json").write_text(json.dumps({"weights": {"a": 1.0}}))
    budget = {"max_tokens": 10**6, "mixture": str(tmp_path / "m.json")}
    options = preprocessing(jsonl("all.jsonl", lines), domains=BY_SET, **budget)
    with (
        pytest.warns(UserWarning, match="not 1,000,000"),
        pytest.warns(UserWarning, match="leaves out 'b', which have no weight: 40 of"),
    ):
        assert list(make_corpus(options).domains) == ["a"]


def test_the_hash_of_the_sources_covers_a_file_that_is_not_read_to_its_end(
    jsonl, texts, preprocessing
):
    hashes = set()
    for seed in (1, 2):
        path = jsonl(f"{seed}.jsonl", texts(3000, seed))
        corpus = make_corpus(preprocessing(f"a={path}", output=f"{seed}", max_tokens=1000))
        hashes.add(corpus.provenance.inputs["sources"])
    assert len(hashes) == 2


@pytest.mark.filterwarnings("ignore:--mixture .* leaves out 'never'")
def test_options_without_a_meaning_together_are_errors(jsonl, texts, preprocessing, mixture):
    path = jsonl("a.jsonl", [{"text": text, "set": "a"} for text in texts(40)])
    options = preprocessing(path, domains=BY_SET)
    with pytest.raises(UserError, match="--mixture"):
        replace(options, mixture=str(mixture))
    with pytest.raises(UserError, match="--shard"):
        replace(options, max_tokens=100, shard="1/2")
    with pytest.raises(UserError, match="--domain-key"):
        make_corpus(replace(options, max_tokens=100))
    with pytest.raises(UserError, match="'b', 'c'"):
        make_corpus(replace(options, max_tokens=100, mixture=str(mixture)))
