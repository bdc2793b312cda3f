"""The tokenizer of a model that is converted: what it is, where it is found, what is written."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path

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
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    ToHuggingFaceOptions,
    TokenizerChoice,
)
from megatron_chameleon.corpus.gigatoken import difficult_texts
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.errors import UserError
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.checkpoint.samples import TEXTS, VOCAB_SIZE, tensors_in
from tests.unit.corpus.tokenizer_samples import EOD, write_tiktoken


def test_transformers_encodes_alike(exported, made):
    ours = load_tokenizer(made, EOD)
    theirs = transformers.AutoTokenizer.from_pretrained(exported())
    assert theirs.eos_token == EOD
    assert theirs.eos_token_id == ours.eod_id
    texts = difficult_texts(())
    for text, ids in zip(texts, ours.encoder.encode_batch(texts), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs.decode(ids) == ours.decode(ids.tolist())


def test_a_tiktoken_file_is_copied(folder, tmp_path):
    path = tmp_path / "t.tiktoken"
    write_tiktoken(folder / "tokenizer.json", path)
    options = FromHuggingFaceOptions(
        folder, tmp_path / "checkpoint", tokenizer_model=path, tiktoken_pattern="gpt2"
    )
    convert_from_huggingface(options)
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    (copy,) = (tmp_path / "back").glob("tokenizer.*")
    assert copy.read_bytes() == path.read_bytes()
    assert not (tmp_path / "back" / "tokenizer_config.json").exists()


def test_the_tokenizer_of_another_model_is_rejected(converted, folder, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE + 1, EOD))
    with pytest.raises(UserError, match="--tokenizer-model"):
        convert_from_huggingface(
            FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=other)
        )
    with pytest.raises(UserError, match="--tokenizer-model"):
        find_tokenizer(TokenizerChoice(tokenizer_model=other), converted)


def test_rows_beyond_the_tokenizer_are_left_out(folder, tmp_path, capsys):
    """Many public models have a round number of rows."""
    path = tmp_path / "small.json"
    path.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 20, EOD))
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=path)
    convert_from_huggingface(options)
    assert "the last 20 of its 300 embedding rows" in capsys.readouterr().out
    shape = shape_of(CheckpointRecord.load(tmp_path / "checkpoint"))
    assert shape.vocab_size == VOCAB_SIZE - 20
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    expected = tensors_in(folder)["transformer.wte.weight"][: VOCAB_SIZE - 20]
    assert torch.equal(tensors_in(tmp_path / "back")["transformer.wte.weight"], expected)


def made_with(record, **options):
    """The record, as if made with these options."""
    made_by = dataclasses.replace(record.provenance, options=options)
    return dataclasses.replace(record, provenance=made_by)


@pytest.mark.parametrize("is_passed", [False, True])
def test_a_corpus_names_its_tokenizer(converted, tmp_path, is_passed):
    file = word_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_small_corpus(tmp_path, tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    record = made_with(record, **({} if is_passed else {"corpus": str(corpus.root)}))
    choice = TokenizerChoice(tokenizer_model=corpus.root if is_passed else None)
    assert find_tokenizer(choice, record).identity == corpus.tokenizer
    with pytest.raises(UserError, match="--tokenizer-model"):
        find_tokenizer(choice, dataclasses.replace(record, tokenizer_hash="0" * 64))
    with pytest.raises(UserError, match="--eod-token gpt2"):
        find_tokenizer(dataclasses.replace(choice, eod_token="gpt2"), record)


def test_an_unrecorded_eod_token_is_assumed_with_a_warning(converted, made, tmp_path):
    record = made_with(converted, corpus=str(tmp_path / "gone"), data={"eod_token": "not of it"})
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=made)
    with pytest.warns(UserWarning, match="--eod-token"):
        assert find_tokenizer(options, record).sha256 == record.tokenizer_hash
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_tokenizer(dataclasses.replace(options, eod_token=EOD), record)


def test_the_eod_token_is_the_recorded_one(converted, folder, tmp_path):
    """Documents end with </s>; the tokenizer also has <|endoftext|>."""
    tokenizer = Tokenizer.from_str(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 1, EOD).decode())
    assert tokenizer.add_special_tokens(["</s>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    convert_from_huggingface(FromHuggingFaceOptions(folder, checkpoint, eod_token="</s>"))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint, back))
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == VOCAB_SIZE - 1
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == "</s>"
    options = ToHuggingFaceOptions(checkpoint, back, eod_token=EOD, overwrite=True)
    convert_to_huggingface(options)
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == EOD
    # A run on megatron's data records the same.
    data = {"tokenizer_model": str(folder), "eod_token": "</s>"}
    record = dataclasses.replace(converted, tokenizer_hash=load_tokenizer(folder, "</s>").sha256)
    for choice in (TokenizerChoice(), TokenizerChoice(tokenizer_model=folder)):
        assert find_tokenizer(choice, made_with(record, data=data)).eod_id == VOCAB_SIZE - 1


@pytest.mark.parametrize("by", ["model", "corpus"])
def test_a_relative_path_is_resolved_from_the_run(converted, tmp_path, monkeypatch, by):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "corpus").mkdir(parents=True)
    here.mkdir()
    file = word_tokenizer(there / "corpus" / "tokenizer.json")
    corpus = write_small_corpus(there / "corpus", tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    path = Path(os.path.relpath(corpus.root if by == "corpus" else file, there))
    monkeypatch.chdir(there)
    made_by = provenance(ToHuggingFaceOptions(Path("run"), Path("out")), {})
    record = made_with(dataclasses.replace(record, provenance=made_by), **{by: str(path)})
    monkeypatch.chdir(here)
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", eod_token=None)
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256
    there.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=str(there / path)):
        find_tokenizer(options, record)
    monkeypatch.chdir(tmp_path / "moved")  # everything was moved
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256
