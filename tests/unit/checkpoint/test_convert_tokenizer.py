"""The tokenizer of a model that is converted: what it is, where it is found, what is written."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from megatron_chameleon.artifacts import CheckpointRecord, provenance
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.convert import (
    convert_from_huggingface,
    convert_to_huggingface,
    find_tokenizer,
)
from megatron_chameleon.checkpoint.load import shape_of
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.corpus.gigatoken import difficult_texts
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe, sentencepiece_bpe
from megatron_chameleon.errors import UserError
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.checkpoint.samples import TEXTS, VOCAB_SIZE, tensors_in
from tests.unit.corpus.tokenizer_samples import EOD, write_gpt2_files, write_tiktoken


def test_transformers_encodes_alike(exported, made):
    ours = load_tokenizer(made, EOD)
    theirs = transformers.AutoTokenizer.from_pretrained(exported())
    assert theirs.eos_token == EOD
    assert theirs.eos_token_id == ours.eod_id
    texts = difficult_texts(())
    for text, ids in zip(texts, ours.encoder.encode_batch(texts), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs.decode(ids) == ours.decode(ids.tolist())


def test_gpt2s_pair_of_tokenizer_files_is_a_tokenizer(folder, tmp_path):
    write_gpt2_files(folder / "tokenizer.json", folder)
    (folder / "tokenizer.json").unlink()
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint"))
    record = CheckpointRecord.load(tmp_path / "checkpoint")
    assert record.tokenizer_hash == load_tokenizer(folder, EOD).sha256
    convert_to_huggingface(ToHuggingFaceOptions(record.root, tmp_path / "back"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ours = load_tokenizer(folder, EOD)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encoder.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_other_tokenizers_are_copied(folder, tmp_path, kind, capsys):
    given = tmp_path / ("t.model" if kind == "sentencepiece" else "t.tiktoken")
    if kind == "sentencepiece":
        given.write_bytes(sentencepiece_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    else:
        write_tiktoken(folder / "tokenizer.json", given)
    asked = {"tokenizer_model": given}
    if kind == "tiktoken":
        asked["tiktoken_pattern"] = "gpt2"
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint", **asked))
    capsys.readouterr()
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    assert "AutoTokenizer" in capsys.readouterr().out
    (copy,) = (tmp_path / "back").glob("tokenizer.*")
    assert copy.read_bytes() == given.read_bytes()
    assert not (tmp_path / "back" / "tokenizer_config.json").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_rejected(folder, tmp_path):
    given = tmp_path / "large.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE + 1, EOD))
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=given)
    with pytest.raises(UserError, match="--tokenizer-model"):
        convert_from_huggingface(options)


def test_rows_beyond_the_tokenizer_are_left_out(folder, tmp_path, capsys):
    """Many public models have a round number of rows."""
    given = tmp_path / "small.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 20, EOD))
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=given)
    convert_from_huggingface(options)
    assert "the last 20 of its 300 embedding rows" in capsys.readouterr().out
    shape = shape_of(CheckpointRecord.load(tmp_path / "checkpoint"))
    assert shape.vocab_size == VOCAB_SIZE - 20
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    expected = tensors_in(folder)["transformer.wte.weight"][: VOCAB_SIZE - 20]
    assert torch.equal(tensors_in(tmp_path / "back")["transformer.wte.weight"], expected)


def test_the_tokenizer_of_another_model_is_rejected(converted, tmp_path):
    given = tmp_path / "other.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS[:9]), 280, EOD))
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    with pytest.raises(UserError, match="--tokenizer-model"):
        find_tokenizer(options, converted)


def made_with(record, **options):
    """The record, as if made with these options."""
    made_by = dataclasses.replace(record.provenance, options=options)
    return dataclasses.replace(record, provenance=made_by)


def test_a_missing_tokenizer_has_to_be_passed(converted, made, tmp_path):
    record = made_with(converted, model=str(tmp_path / "gone"))
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out")
    with pytest.raises(UserError, match="--tokenizer-model"):
        find_tokenizer(options, record)
    given = dataclasses.replace(options, tokenizer_model=made / "tokenizer.json")
    assert find_tokenizer(given, record).sha256 == record.tokenizer_hash


@pytest.mark.parametrize("is_given", [False, True])
def test_a_corpus_names_its_tokenizer(converted, tmp_path, is_given):
    file = word_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_small_corpus(tmp_path, tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    record = made_with(record, **({} if is_given else {"corpus": str(corpus.root)}))
    given = corpus.root if is_given else None
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    assert find_tokenizer(options, record).identity == corpus.tokenizer
    another = dataclasses.replace(record, tokenizer_hash="0" * 64)
    with pytest.raises(UserError, match="--tokenizer-model"):
        find_tokenizer(options, another)


def test_an_unrecorded_eod_token_is_assumed_with_a_warning(converted, made, tmp_path):
    record = made_with(converted, corpus=str(tmp_path / "gone"), data={"eod_token": "not of it"})
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=made)
    with pytest.warns(UserWarning, match="--eod-token"):
        assert find_tokenizer(options, record).sha256 == record.tokenizer_hash
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_tokenizer(dataclasses.replace(options, eod_token=EOD), record)


@pytest.fixture
def ended_otherwise(folder):
    """A model's folder whose documents end with </s>; its tokenizer also has <|endoftext|>."""
    tokenizer = Tokenizer.from_str(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 1, EOD).decode())
    assert tokenizer.add_special_tokens(["</s>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_eod_token_is_the_recorded_one(ended_otherwise, tmp_path):
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    convert_from_huggingface(FromHuggingFaceOptions(ended_otherwise, checkpoint, eod_token="</s>"))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint, back))
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == VOCAB_SIZE - 1
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == "</s>"
    given = ToHuggingFaceOptions(checkpoint, back, eod_token=EOD, overwrite=True)
    convert_to_huggingface(given)
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == EOD


@pytest.mark.parametrize("is_given", [False, True])
def test_the_tokenizer_and_eod_token_of_megatrons_data_are_found(
    converted, ended_otherwise, tmp_path, is_given
):
    record = dataclasses.replace(
        converted, tokenizer_hash=load_tokenizer(ended_otherwise, "</s>").sha256
    )
    data = {"tokenizer_model": str(ended_otherwise), "eod_token": "</s>"}
    record = made_with(record, corpus=None, data=data)
    given = ended_otherwise if is_given else None
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    assert find_tokenizer(options, record).eod_id == VOCAB_SIZE - 1


@pytest.mark.parametrize("by", ["model", "corpus"])
def test_a_relative_path_is_resolved_from_the_run(converted, tmp_path, monkeypatch, by):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "corpus").mkdir(parents=True)
    here.mkdir()
    file = word_tokenizer(there / "corpus" / "tokenizer.json")
    corpus = write_small_corpus(there / "corpus", tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    given = Path(os.path.relpath(corpus.root if by == "corpus" else file, there))
    monkeypatch.chdir(there)
    made_by = provenance(ToHuggingFaceOptions(Path("run"), Path("out")), {})
    record = made_with(dataclasses.replace(record, provenance=made_by), **{by: str(given)})
    monkeypatch.chdir(here)
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", eod_token=None)
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256
    there.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=str(there / given)):
        find_tokenizer(options, record)
    monkeypatch.chdir(tmp_path / "moved")  # everything was moved
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256


@pytest.mark.parametrize("option", ["tiktoken_pattern", "eod_token"])
@pytest.mark.parametrize("is_given", [False, True])
def test_options_that_a_corpus_records_are_rejected(converted, tmp_path, option, is_given):
    corpus = write_small_corpus(tmp_path).root
    record = made_with(converted, corpus=str(corpus))
    options = ToHuggingFaceOptions(
        converted.root, tmp_path / "out", tokenizer_model=corpus if is_given else None
    )
    given: dict[str, Any] = {option: "gpt2"}
    options = dataclasses.replace(options, **given)
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} gpt2"):
        find_tokenizer(options, record)
