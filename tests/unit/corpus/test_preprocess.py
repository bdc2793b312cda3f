from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.corpus import shards
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.options import DomainOptions, PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import all_documents, documents_of, given, made

EOD = "<|endoftext|>"
BY_SET = DomainOptions(domain_key="set")


@pytest.fixture
def options(tmp_path, jsonl, texts, tokenizer_json):
    paths = [f"a={jsonl('a.jsonl', texts(300, 1))}", f"b={jsonl('b.jsonl', texts(200, 2))}"]
    return PreprocessOptions(
        SourceOptions((tuple(paths),)), tmp_path / "corpus", tokenizer_json, split="60,20,20"
    )


def test_every_document_is_in_one_split_of_its_domain(options, texts):
    corpus = made(options)
    assert corpus.names == ["a", "b"]
    for name, seed, count in (("a", 1, 300), ("b", 2, 200)):
        assert sorted(all_documents(corpus, name)) == sorted(texts(count, seed))


def test_the_order_within_a_split_is_that_of_the_input(options, texts):
    written = documents_of(made(options), "a", "train")
    assert written == [text for text in texts(300, 1) if text in set(written)]


def test_corpus_json_counts_what_is_there(options):
    corpus = made(options)
    for name in corpus.names:
        for split in SPLITS:
            part = corpus.domains[name].split(split)
            found = documents_of(corpus, name, split)
            assert part.documents == len(found) > 0
            assert part.text_bytes == sum(len(text.encode()) for text in found)
            assert part.tokens == open_tokens(corpus, name, split).tokens.size
    corpus.verify()
    assert corpus.dtype == "uint16"
    assert corpus.cost.wall_seconds > 0
    assert corpus.provenance.inputs["tokenizer"] == corpus.tokenizer.sha256
    paths = [Path(given[2:]) for given in options.source.inputs]
    hashes = [sha256_of_files(path) for path in paths]
    assert corpus.provenance.inputs["sources"] == sha256_of_json(hashes)
    sources = json.loads((corpus.root / "sources.json").read_text())["sources"]
    assert sources == [
        {
            "name": str(path),
            "bytes": path.stat().st_size,
            "pieces": [{"start": 0, "stop": None, "sha256": sha256}],
        }
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def test_the_tokenizer_goes_with_the_corpus(options):
    corpus = made(options)
    own = corpus.root / corpus.tokenizer.file
    assert own.read_bytes() == options.tokenizer_model.read_bytes()
    assert corpus_tokenizer(corpus).identity == corpus.tokenizer
    assert corpus_tokenizer(corpus, options.tokenizer_model).identity == corpus.tokenizer


def test_a_tokenizer_that_is_not_the_corpuss_is_refused(options, sentencepiece_model):
    corpus = made(options)
    with pytest.raises(UserError, match="is not the tokenizer that made the corpus"):
        corpus_tokenizer(corpus, sentencepiece_model)
    own = corpus.root / corpus.tokenizer.file
    own.write_text(own.read_text().replace("\n", "\n\n", 1))
    with pytest.raises(UserError, match="its hash differs"):
        corpus_tokenizer(corpus)
    own.unlink()
    with pytest.raises(UserError, match="does not exist"):
        corpus_tokenizer(corpus)


@pytest.mark.parametrize(
    "limit", [("_BATCH_CHARACTERS", 1), ("_BATCH_CHARACTERS", 200), ("_BATCH_DOCUMENTS", 7)]
)
def test_batches_do_not_show(options, tmp_path, monkeypatch, limit):
    first = made(options)
    monkeypatch.setattr(shards, *limit)
    assert made(dataclasses.replace(options, output=tmp_path / "again")).hash == first.hash


def test_sentencepiece_makes_a_corpus_too(options, sentencepiece_model, texts):
    corpus = made(dataclasses.replace(options, tokenizer_model=sentencepiece_model))
    assert corpus.tokenizer.kind == "sentencepiece"
    assert sorted(all_documents(corpus, "b")) == sorted(texts(200, 2))


def test_compressed_files_give_the_same_corpus(options, tmp_path):
    plain = made(options)
    for name in "ab":
        data = (tmp_path / f"{name}.jsonl").read_bytes()
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(data))
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(data))
    for suffix in ("gz", "zst"):
        source = given(*(f"{name}={tmp_path}/{name}.jsonl.{suffix}" for name in "ab"))
        output = tmp_path / suffix
        assert made(dataclasses.replace(options, source=source, output=output)).hash == plain.hash


def test_the_same_text_lands_in_the_same_split_of_every_domain(options, jsonl, texts):
    shared = texts(300, 3)
    source = given(f"a={jsonl('x.jsonl', shared)}", f"b={jsonl('y.jsonl', shared[::-1])}")
    corpus = made(dataclasses.replace(options, source=source))
    for split in SPLITS:
        assert documents_of(corpus, "a", split) == documents_of(corpus, "b", split)[::-1]


@pytest.mark.parametrize("drop", [True, False])
def test_duplicates_are_counted_and_dropped_unless_kept(options, jsonl, texts, capsys, drop):
    some = texts(300, 4)
    source = given(f"a={jsonl('x.jsonl', some + some[:50])}", f"b={jsonl('y.jsonl', some)}")
    corpus = made(dataclasses.replace(options, source=source, drop_duplicates=drop))
    found = all_documents(corpus, "a")
    assert len(found) == (300 if drop else 350)
    assert set(found) == set(some)
    assert len(all_documents(corpus, "b")) == 300
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "a ")
    assert row[6] == "50"
    kept = [set(documents_of(corpus, "a", split)) for split in SPLITS]
    assert not kept[0] & kept[1] | kept[0] & kept[2] | kept[1] & kept[2]


def test_the_summary_tells_what_was_left_out_and_what_to_run_next(options, jsonl, texts, capsys):
    path = jsonl("x.jsonl", ["", *texts(300, 5), b"{", "", *texts(10, 5)])
    source = given(f"a={path}", max_malformed_share=0.01)
    with pytest.warns(UserWarning, match=r"1 of 313 lines are malformed: .*x.jsonl:302"):
        preprocess_data(dataclasses.replace(options, source=source))
    printed = capsys.readouterr().out
    corpus = Corpus.load(options.output)
    tokens = [corpus.domains["a"].split(split).tokens for split in SPLITS]
    row = next(line.split() for line in printed.splitlines() if line.startswith("a "))
    assert row[:5] == ["a", "300", *(f"{count:,}" for count in tokens)]
    assert row[6:] == ["10", "2", "1"]
    assert f"tools/pretrain_gpt.py --corpus {options.output}" in printed


def refused(options, problem, **changes):
    """The run fails with one line that matches, and leaves nothing."""
    options = dataclasses.replace(options, **changes)
    with pytest.raises(UserError, match=problem) as caught:
        preprocess_data(options)
    assert "\n" not in str(caught.value)
    assert not options.output.exists()


def test_an_empty_domain_is_refused(options, jsonl, texts):
    full = f"full={jsonl('full.jsonl', texts(300))}"
    for name, lines in (("none", []), ("blank", [b"", b""]), ("textless", ["", ""])):
        path = jsonl(f"{name}.jsonl", lines)
        problem = rf"domain 'void' is empty: .*{name}\.jsonl"
        refused(options, problem, source=given(full, f"void={path}"))
    refused(
        options,
        "there is no text in",
        source=given(jsonl("no.jsonl", [])),
        domains=BY_SET,
    )


def test_a_split_without_documents_is_refused(options, jsonl, texts):
    source = given(f"small={jsonl('small.jsonl', texts(3))}")
    refused(options, "'small' has no document in .*, of 3 in all.*--split", source=source)


def test_a_damaged_file_is_refused_in_the_middle(options, tmp_path):
    whole = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    source = given(*options.source.inputs, f"c={tmp_path}/cut.jsonl.gz")
    refused(options, "cut.jsonl.gz is truncated", source=source)


def test_names_of_any_kind_make_good_file_names(options, jsonl, texts):
    names = ["c/c++ code", "..", "日本語", "a%2Fb", "a b", "a_b"]
    records = [{"text": text, "set": name} for name in names for text in texts(300)]
    source = given(jsonl("names.jsonl", records))
    corpus = made(dataclasses.replace(options, source=source, domains=BY_SET))
    assert corpus.names == names
    inside = [path.parent for path in options.output.parent.rglob("*.bin")]
    assert set(inside) == {corpus.root / "tokens"}
    assert len(inside) == len(names) * len(SPLITS)


def test_too_many_domains_are_refused(options, jsonl, texts, monkeypatch):
    monkeypatch.setattr(shards, "MAX_DOMAINS", 3)
    records = [{"text": text, "set": text[:9]} for text in texts(300)]
    source = given(jsonl("many.jsonl", records))
    refused(
        options,
        "more than 3 domains.*--domain-key",
        source=source,
        domains=BY_SET,
    )


def test_names_to_rename_that_never_occur_are_told_in_the_end(options, jsonl, texts):
    records = [{"text": text, "set": name} for name in "ab" for text in texts(300)]
    source = given(jsonl("names.jsonl", records))
    domains = DomainOptions(
        domain_key="set", rename_domain=(("a=one", "A=one", "B="), ("*=rest", "c=d"))
    )
    with pytest.warns(UserWarning, match="--rename-domain: no domain is called 'A', 'B', 'c'$"):
        corpus = made(dataclasses.replace(options, source=source, domains=domains))
    assert corpus.names == ["one", "rest"]


@pytest.mark.parametrize("drop", [True, False])
def test_one_shard_gives_what_many_give(options, jsonl, texts, tmp_path, drop):
    some = texts(300, 4)
    source = given(f"a={jsonl('x.jsonl', some + some[:5])}", f"b={jsonl('y.jsonl', texts(300, 6))}")
    changed = dataclasses.replace(options, source=source, drop_duplicates=drop)
    one = made(changed)
    many = made(dataclasses.replace(changed, output=tmp_path / "many", shard_bytes=3000))
    assert one.hash == many.hash
    one.verify()
