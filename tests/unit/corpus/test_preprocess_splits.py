"""Splits that sources bring along, texts that are in several, and documents of nothing."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import Strip

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus.options import DomainOptions, EncoderOptions, PreprocessOptions
from tests.unit.corpus.corpus_making import all_documents, documents_of, given, made


@pytest.fixture
def options(tmp_path, tokenizer_json):
    return PreprocessOptions(
        given(), tmp_path / "corpus", tokenizer_json, split="60,20,20", shard_bytes=3000
    )


def own_splits(valid, test):
    return DomainOptions(valid_input=((str(valid),),), test_input=((str(test),),))


def splits_of(corpus, name):
    return {split: documents_of(corpus, name, split) for split in SPLITS}


def test_splits_of_a_source_are_taken_as_they_are(options, jsonl, texts):
    train, valid, test = texts(200, 1), texts(30, 2), texts(20, 3)
    corpus = made(
        dataclasses.replace(
            options,
            source=given(f"a={jsonl('train.jsonl', train)}"),
            domains=own_splits(
                f"a={jsonl('valid.jsonl', valid)}", f"a={jsonl('test.jsonl', test)}"
            ),
        )
    )
    assert splits_of(corpus, "a") == {"train": train, "valid": valid, "test": test}
    assert corpus.not_written["a"].held_out == 0


def test_splits_of_sources_and_splits_by_text_go_together(options, jsonl, texts):
    train, valid, test, other = texts(200, 1), texts(30, 2), texts(20, 3), texts(300, 4)
    source = given(f"a={jsonl('train.jsonl', train)}", f"b={jsonl('b.jsonl', other)}")
    domains = own_splits(f"a={jsonl('valid.jsonl', valid)}", f"a={jsonl('test.jsonl', test)}")
    corpus = made(dataclasses.replace(options, source=source, domains=domains))
    assert splits_of(corpus, "a") == {"train": train, "valid": valid, "test": test}
    alone = made(
        dataclasses.replace(
            options, source=given(source.inputs[1]), output=options.output.with_name("alone")
        )
    )
    assert splits_of(corpus, "b") == splits_of(alone, "b")


@pytest.mark.parametrize("drop", [True, False])
def test_no_text_of_valid_or_test_is_in_a_split_before_it(options, jsonl, texts, capsys, drop):
    """Domain a has splits of its own; b is split by its texts, and has some of a's in it."""
    train, valid, test, other = texts(200, 1), texts(40, 2), texts(40, 3), texts(300, 4)
    files = {
        "train": jsonl("train.jsonl", [*train, *valid[:5], *test[:6], *test[:2], *other]),
        "valid": jsonl("valid.jsonl", [*valid, *test[5:9]]),
        "test": jsonl("test.jsonl", [*test, *test[:3]]),
        "b": jsonl("b.jsonl", [*other, *valid, *test]),
    }
    corpus = made(
        dataclasses.replace(
            options,
            source=given(f"a={files['train']}", f"b={files['b']}"),
            domains=own_splits(f"a={files['valid']}", f"a={files['test']}"),
            drop_duplicates=drop,
        )
    )
    found = {name: splits_of(corpus, name) for name in "ab"}
    of_b = {text: split for split in SPLITS for text in found["b"][split]}
    assert found["a"]["train"] == [*train, *(text for text in other if of_b[text] == "train")]
    assert found["a"]["valid"] == valid
    assert found["a"]["test"] == (test if drop else [*test, *test[:3]])

    by_split = {split: {t for name in "ab" for t in found[name][split]} for split in SPLITS}
    assert not by_split["train"] & by_split["valid"]
    assert not (by_split["train"] | by_split["valid"]) & by_split["test"]

    left_out = {name: corpus.not_written[name] for name in "ab"}
    held_out_of_other = sum(of_b[text] != "train" for text in other)
    assert left_out["a"].held_out == 5 + 6 + 2 + 4 + held_out_of_other
    assert left_out["b"].held_out == len(other + valid + test) - len(all_documents(corpus, "b"))
    assert (left_out["a"].duplicates, left_out["b"].duplicates) == (3, 0)
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-5:] == ["duplicates", "held", "out", "empty", "malformed"]
    assert row.split()[-4:] == ["3", f"{left_out['a'].held_out}", "0", "0"]


def test_texts_that_are_empty_null_or_without_a_token_are_counted(
    options, jsonl, texts, tmp_path, tokenizer_json
):
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.normalizer = Strip()
    tokenizer.save(str(tmp_path / "strip.json"))
    nothing = ["", {"text": None}, " ", "\n\n", {"text": ""}]
    records = [*texts(100, 1), *nothing, *texts(100, 2), " "]
    corpus = made(
        dataclasses.replace(
            options,
            source=given(f"a={jsonl('a.jsonl', records)}"),
            tokenizer_model=tmp_path / "strip.json",
            encoding=EncoderOptions(encoder="own"),
        )
    )
    kept = [text.strip() for text in texts(100, 1) + texts(100, 2)]
    assert sorted(all_documents(corpus, "a")) == sorted(kept)
    assert corpus.not_written["a"].empty == 6
    assert min(len(text) for text in all_documents(corpus, "a")) > 0
