"""Corpora made from text: their contents do not depend on the division into shards."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import Strip

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus import indexed, join, shards
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.options import DomainOptions, EncoderOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.staging import ShardPlan
from megatron_chameleon.corpus.tokenizer import Tokenizer as CorpusTokenizer
from megatron_chameleon.errors import UserError
from tests.full_disk import largest_file_size
from tests.unit.corpus.corpus_making import (
    all_documents,
    assert_same,
    assert_same_tokens,
    documents_of,
    left_in,
    make_corpus,
    source_options,
)

BY_SET = DomainOptions(domain_key="set")
BOTH = (("a", 300, 1), ("b", 200, 2))


@pytest.fixture
def options(preprocessing, jsonl, texts):
    """Two domains of 300 and 200 documents, in shards of 4 kB."""
    inputs = [f"{x}={jsonl(f'{x}.jsonl', texts(n, seed))}" for x, n, seed in BOTH]
    return preprocessing(*inputs, shard_bytes=4000)


def splits_of(corpus, name):
    return {split: documents_of(corpus, name, split) for split in SPLITS}


def number_of_shards(options):
    return len(ShardPlan.load(options.output / ".partial").shards)


# Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("split", value) for value in ("", "90,10", "1,2,3,4", "a,b,c", "100,0,0", "nan,1,1")),
        *(("shard", value) for value in ("", "3", "0/3", "4/3", "-1/3", "1/3/5")),
        ("workers", 0),
    ],
)
def test_values_out_of_range_are_rejected(preprocessing, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        preprocessing("a.jsonl", **{name: value})


# Contents


def test_a_corpus_holds_each_document_once_in_order(options, texts, sentencepiece_model):
    corpus = make_corpus(options)
    assert corpus.names == ["a", "b"]
    for name, count, seed in BOTH:
        assert sorted(all_documents(corpus, name)) == sorted(texts(count, seed))
        for split, found in splits_of(corpus, name).items():
            assert found == [text for text in texts(count, seed) if text in set(found)]
            part = corpus.domains[name].split(split)
            assert part.documents == len(found) > 0
            assert part.text_bytes == sum(len(text.encode()) for text in found)
            assert part.tokens == open_domains(corpus).open(name, split).tokens.size
    corpus.verify()
    assert corpus.dtype == "uint16"
    assert replace(options, split=" 3, 1 ,1").split_shares == options.split_shares
    again = replace(options, tokenizer_model=sentencepiece_model, overwrite=True)
    corpus = make_corpus(again)
    assert corpus.tokenizer.kind == "sentencepiece"
    assert sorted(all_documents(corpus, "b")) == sorted(texts(200, 2))


@pytest.mark.parametrize("drop", [True, False])
def test_no_text_of_valid_or_test_is_in_an_earlier_split(options, jsonl, texts, drop):
    """The files of domain a define its splits; domain b is split by hash, and has texts of a."""
    train, valid, test, other = texts(200, 1), texts(40, 2), texts(40, 3), texts(300, 4)
    a, a_valid, a_test, b = (
        jsonl(f"{name}.jsonl", lines)
        for name, lines in {
            "train": [*train, *valid[:5], *test[:6], *test[:2], *other],
            "valid": [*valid, *test[5:9]],
            "test": [*test, *test[:3]],
            "b": [*other, *valid, *test],
        }.items()
    )
    held_out = DomainOptions(valid_input=((f"a={a_valid}",),), test_input=((f"a={a_test}",),))
    options = replace(options, domains=held_out, drop_duplicates=drop)
    corpus = make_corpus(replace(options, source=source_options(f"a={a}", f"b={b}")))
    found = {name: splits_of(corpus, name) for name in "ab"}
    of_b = {text: split for split in SPLITS for text in found["b"][split]}
    assert found["a"]["train"] == [*train, *(text for text in other if of_b[text] == "train")]
    assert found["a"]["valid"] == valid
    assert found["a"]["test"] == (test if drop else [*test, *test[:3]])
    in_train, in_valid, in_test = ({*found["a"][s], *found["b"][s]} for s in SPLITS)
    assert not in_train & in_valid
    assert not (in_train | in_valid) & in_test
    left_out = {name: corpus.not_written[name] for name in "ab"}
    held_out_of_other = sum(of_b[text] != "train" for text in other)
    assert left_out["a"].held_out == 5 + 6 + 2 + 4 + held_out_of_other
    assert left_out["b"].held_out == len(other + valid + test) - len(all_documents(corpus, "b"))
    assert (left_out["a"].duplicates, left_out["b"].duplicates) == (3, 0)


def test_no_text_of_a_held_out_domain_is_trained_on(options, jsonl, texts, tmp_path):
    target, a, b = texts(200, 5), texts(300, 1), texts(200, 2)
    sources = source_options(
        f"a={jsonl('c.jsonl', [*target[:60], *a, *target[:9]])}",
        f"b={jsonl('d.jsonl', [*b, *target[50:100]])}",
    )
    held_out = DomainOptions(held_out=((f"t={jsonl('t.jsonl', [*target, *target[:7]])}",),))
    options = replace(options, source=sources, domains=held_out)
    corpus = make_corpus(options)
    assert (corpus.names, list(corpus.held_out)) == (["a", "b"], ["t"])
    assert (corpus.held_out["t"].train.documents, corpus.held_out["t"].train.tokens) == (0, 0)
    of_target = {s: documents_of(corpus, "t", s) for s in SPLITS[1:]}
    assert sorted([*of_target["valid"], *of_target["test"]]) == sorted(target)
    assert 70 < len(of_target["valid"]) < 130  # --split has equal shares of valid and test
    assert corpus.not_written["t"].duplicates == 7
    for name, texts_of_target, own in (("a", target[:60], a), ("b", target[50:100], b)):
        found = splits_of(corpus, name)
        assert not {*found["train"]} & {*target}
        # Other copies stay, since they are in the same split of every domain.
        for split, kept in of_target.items():
            assert {*found[split]} & {*target} <= {*kept}
        kept_texts = [text for split in SPLITS for text in found[split]]
        assert {*own} <= {*kept_texts} <= {*own, *texts_of_target}
        repeated = 9 if name == "a" else 0
        counts = corpus.not_written[name]
        left_out = len(own) + len(texts_of_target) + repeated - len(kept_texts)
        assert counts.held_out + counts.duplicates == left_out
        assert counts.held_out >= 20
    one_shard = replace(options, output=tmp_path / "one", shard_bytes=100_000_000)
    assert make_corpus(one_shard).hash == corpus.hash
    several = replace(options, output=tmp_path / "several")
    for shard in ("2/2", "1/2"):
        preprocess_data(replace(several, shard=shard))
    assert_same(corpus, make_corpus(several))


def test_mistakes_of_held_out_domains(options, jsonl, texts):
    path = jsonl("t.jsonl", texts(50, 5))
    lines = [{"text": text, "set": "abt"[i % 3]} for i, text in enumerate(texts(200, 1))]
    by_key = replace(options, source=source_options(jsonl("keyed.jsonl", lines)))
    for changed, held_out, domains, match in (
        (options, f"a={path}", DomainOptions(), "'a'"),
        (options, f"{path}", DomainOptions(), "NAME="),
        (options, f"t={path}", DomainOptions(valid_input=((f"t={path}",),)), "'t'"),
        (by_key, f"t={path}", BY_SET, "'t'"),
        (options, f"t={jsonl('u.jsonl', texts(1, 7))}", DomainOptions(), "'t' has 0 documents"),
    ):
        domains = replace(domains, held_out=((held_out,),))
        with pytest.raises(UserError, match=match):
            make_corpus(replace(changed, domains=domains))


def test_documents_without_text_or_tokens_are_counted(
    options, jsonl, texts, tmp_path, tokenizer_json
):
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.normalizer = Strip()
    tokenizer.save(str(tmp_path / "strip.json"))
    lines = ["", {"text": None}, *texts(100), " ", "\n\n"]
    options = replace(options, source=source_options(f"a={jsonl('a.jsonl', lines)}"))
    own = EncoderOptions(encoder="own")
    corpus = make_corpus(replace(options, tokenizer_model=tmp_path / "strip.json", encoding=own))
    assert sorted(all_documents(corpus, "a")) == sorted(text.strip() for text in texts(100))
    assert corpus.not_written["a"].empty == 4


def test_malformed_lines_of_all_shards_count_together(options, jsonl, texts):
    lines = [*texts(150, 1), b"{", *texts(150, 2), b"[]", *texts(100, 3)]
    source = source_options(f"a={jsonl('a.jsonl', lines)}", max_malformed_share=0.004)
    with pytest.raises(UserError, match=r"2 of 402 lines are malformed"):
        preprocess_data(replace(options, source=source))
    lenient = replace(source, max_malformed_share=0.005)
    with pytest.warns(UserWarning, match="2 of 402 lines are malformed"):
        corpus = make_corpus(replace(options, source=lenient))
    assert corpus.not_written["a"].malformed == 2


# There are two shards of more than 1,000 lines, and the parent process reads no sample, so that a
# worker raises the error.
IN_WORKERS = {"text_key": "no", "workers": 2, "shard_bytes": 200_000}
IN_WORKERS |= {"encoding": EncoderOptions(encoder="own")}


@pytest.mark.parametrize(
    ("name", "count", "changes", "problem"),
    [
        ("void=", 0, {}, "domain 'void' has 0 documents in .*--split"),
        ("a=", 300, {"min_tokens_per_split": 10**6}, "--min-tokens-per-split"),
        ("", 300, {"domains": DomainOptions(domain_key="text")}, "more than 3 domains"),
        ("a=", 2600, IN_WORKERS, "no key 'no'"),
    ],
)
def test_unusable_text_is_rejected_and_leaves_no_output(
    options, jsonl, texts, monkeypatch, name, count, changes, problem
):
    monkeypatch.setattr(shards, "MAX_DOMAINS", 3)
    path, changes = jsonl("x.jsonl", texts(count)), {"shard_bytes": 10**9, **changes}
    source = source_options(f"{name}{path}", text_key=changes.pop("text_key", "text"))
    with pytest.raises(UserError, match=problem) as raised:
        preprocess_data(replace(options, source=source, **changes))
    assert "\n" not in str(raised.value)
    assert not options.output.exists()


# Workers and threads


def test_an_error_in_a_worker_is_reported_as_in_one_process(options, tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "some text"}\n' * 5000)[:-20])
    source = source_options(f"b={tmp_path}/b.jsonl", f"a={path}")
    options = replace(options, source=source, encoding=EncoderOptions(encoder="own"))
    messages = []
    for workers in (1, 2):
        with pytest.raises(UserError) as raised:
            preprocess_data(replace(options, workers=workers, output=tmp_path / str(workers)))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert str(path) in messages[0]


def test_a_stalled_read_does_not_delay_an_interrupt(options, monkeypatch):
    read, ended, was_read = shards._batches, threading.Event(), []

    def stall(*arguments):
        yield from itertools.islice(read(*arguments), 1)
        ended.wait(60)
        was_read.append(True)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "_batches", stall)
    monkeypatch.setattr(CorpusTokenizer, "encode_documents", interrupt)
    with pytest.raises(KeyboardInterrupt):
        preprocess_data(options)
    assert not was_read
    ended.set()


# Division of the work


@pytest.fixture
def mixed(options, jsonl, texts, tmp_path):
    """Options for files of three formats with repeated texts, whose records name their domains."""
    some = texts(300, 1)
    records = [
        {"text": text, "set": "abc"[number % 3]} for number, text in enumerate(some + some[:80])
    ]
    empty = [{"text": "", "set": "a"}, {"text": None, "set": "b"}]
    packed = jsonl("x/2.jsonl", [{"text": text, "set": "d"} for text in texts(60, 2)])
    packed.rename(tmp_path / "2.jsonl")
    (tmp_path / "x/2.jsonl.gz").write_bytes(gzip.compress((tmp_path / "2.jsonl").read_bytes()))
    table = pa.table({"text": texts(90, 3), "set": ["e"] * 90})
    pq.write_table(table, tmp_path / "x/3.parquet", row_group_size=20)
    jsonl("x/0.jsonl", records[:200])
    jsonl("x/1.jsonl", [*records[200:], *empty])
    return replace(options, source=source_options(tmp_path / "x"), domains=BY_SET)


@pytest.mark.parametrize("drop", [True, False])
def test_the_corpus_does_not_depend_on_shard_and_buffer_sizes(mixed, tmp_path, monkeypatch, drop):
    mixed = replace(mixed, drop_duplicates=drop)
    whole = make_corpus(replace(mixed, output=tmp_path / "whole", shard_bytes=10**9))
    for shard_bytes in (2000, 4000):
        if shard_bytes == 4000:
            for module, name, size in [
                (shards, "_BATCH_CHARACTERS", 100),
                (shards, "_RUN_DOCUMENTS", 4),
                (join, "_RANGE_TEXTS", 5),
                (join, "_COPIES", 3),
                (join, "_BLOCK_DOCUMENTS", 3),
                (join, "_BLOCK_BYTES", 16),
                (join, "_WAITING_BYTES", 200),
                (indexed, "_BUFFER_BYTES", 64),
                (indexed, "_INDEX_BLOCK", 5),
            ]:
                monkeypatch.setattr(module, name, size)
        output = tmp_path / f"{shard_bytes}"
        corpus = make_corpus(replace(mixed, output=output, shard_bytes=shard_bytes))
        assert_same_tokens(corpus, whole)


# Resuming


def test_a_full_disk_while_joining_keeps_all_shards(options, tmp_path, capsys):
    expected = make_corpus(replace(options, output=tmp_path / "expected"))
    most = (expected.root / "tokens" / "a-train.bin").stat().st_size
    with pytest.raises(UserError, match=r"a-train\.bin"), largest_file_size(most - 1):
        preprocess_data(options)
    total = number_of_shards(options)
    left = [name for name in left_in(options.output) if "shards/" not in name]
    assert left == [".partial/plan.json"]
    assert_same(make_corpus(options), expected)
    assert f"{total} of {total} shards were finished before" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["size", "content", None])
def test_resuming_with_a_source_of_changed_content_is_an_error(options, tmp_path, change):
    """A changed size or content raises UserError; a changed modification time alone does not."""
    preprocess_data(replace(options, shard="1/3"))
    path = tmp_path / "a.jsonl"
    content = path.read_bytes()
    if change == "size":
        content += b"\n"
    elif change == "content":
        content = content.replace(b'"text": "', b'"text": "Q', 1).replace(b" ", b"", 1)
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    if change is None:
        expected = make_corpus(replace(options, output=tmp_path / "expected"))
        assert_same(make_corpus(options), expected)
        return
    for shard in ("2/3", None):
        with pytest.raises(UserError, match=r"a\.jsonl .*restore it"):
            preprocess_data(replace(options, shard=shard))


def test_damaged_shards_and_those_of_other_plans_are_rejected(options, tmp_path):
    preprocess_data(replace(options, shard="1/2"))
    shard = options.output / ".partial" / "shards" / "000002"
    tokens, record = shard / "tokens.bin", shard / "shard.json"
    content = tokens.read_bytes()
    os.truncate(tokens, 10)
    with pytest.raises(UserError, match=rf"tokens\.bin .*remove {shard}"):
        preprocess_data(options)
    tokens.write_bytes(content)
    body = json.loads(record.read_text())
    del body["checksum"]
    record.write_text(json.dumps({**body, "plan": "0" * 64}))
    with pytest.raises(UserError, match=rf"another plan.*remove {shard}"):
        preprocess_data(options)
    shutil.rmtree(shard)
    assert_same(make_corpus(options), make_corpus(replace(options, output=tmp_path / "new")))
