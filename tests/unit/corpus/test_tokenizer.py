"""Tokenizer files in every format, encoding documents, and training tokenizers."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
import sentencepiece
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import TokenizerIdentity
from megatron_chameleon.corpus.gigatoken import with_gigatoken
from megatron_chameleon.corpus.options import SourceOptions, TrainTokenizerOptions
from megatron_chameleon.corpus.tokenizer import (
    LONGEST_PART,
    PATTERNS,
    PUBLISHED,
    PublishedFile,
    TokenizerFile,
    load_tokenizer,
    parts,
    recorded_tokenizer_file,
    same_ids,
    tokenizer_json_of,
)
from megatron_chameleon.corpus.train_tokenizer import sentencepiece_bpe, train_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.tokenizer_samples import EOD, awkward_text, write_gpt2_files, write_tiktoken

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [
    "abc def\n\n    indented\tby tab  \r\n",
    "Grüße, 世界 🌍 \u0000 \u200b",
    f"a document about {EOD} and </s>",
    "It's we'LL 12345 Words, in  two   spaces\r\n\n\t x=y; ",
    "camelCase ÄÖÜ čeština 世界 🌍\u00a0!! //\n/",
    "",
    "x",
]


@pytest.fixture(params=["tokenizer.json", "tokenizer.model", "vocab.json", "x.tiktoken"])
def path(request, tmp_path, tokenizer_json, sentencepiece_model):
    if request.param == "vocab.json":
        return write_gpt2_files(tokenizer_json, tmp_path)
    if request.param == "x.tiktoken":
        return write_tiktoken(tokenizer_json, tmp_path / request.param)
    return tokenizer_json if request.param == tokenizer_json.name else sentencepiece_model


def load(path):
    return load_tokenizer(path, EOD, "gpt2" if path.suffix == ".tiktoken" else None)


def documents(tokenizer, texts):
    """Encode texts; return the ids of each text with its end-of-document token."""
    tokens, lengths = tokenizer.encode_documents(texts)
    assert tokens.dtype == tokenizer.token_type
    assert lengths.dtype == np.int32
    assert len(lengths) == len(texts)
    assert lengths.sum() == len(tokens)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_documents_decode_to_their_texts_with_one_end_token(path):
    tokenizer = load(path)
    together = documents(tokenizer, TEXTS)
    assert together == [documents(tokenizer, [text])[0] for text in TEXTS]
    for text, ids in zip(TEXTS, together, strict=True):
        assert tokenizer.decode(ids[:-1]) == text
        assert ids.index(tokenizer.eod_id) == len(ids) - 1
        assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
    tokens, lengths = tokenizer.encode_documents([])
    assert tokens.shape == lengths.shape == (0,)


def test_a_byte_level_bpe_gives_the_same_ids_in_every_form(tokenizer_json, tmp_path):
    expected = documents(load(tokenizer_json), TEXTS)
    assert documents(load(write_gpt2_files(tokenizer_json, tmp_path)), TEXTS) == expected
    tiktoken = documents(load(write_tiktoken(tokenizer_json, tmp_path / "a.tiktoken")), TEXTS)
    # In the tiktoken file the end-of-document token has the last id, not the first.
    assert [[1 + i for i in ids[:-1]] + [0] for ids in tiktoken] == expected


@pytest.mark.parametrize("fast", [False, True])
def test_dropout_of_the_file_is_ignored(tokenizer_json, tmp_path, fast):
    body = json.loads(tokenizer_json.read_bytes())
    body["model"]["dropout"] = 0.5
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(body))
    plain, random = load(tokenizer_json), load(path)
    random = with_gigatoken(random) if fast else random
    assert documents(random, TEXTS) == documents(plain, TEXTS)


def test_a_long_text_has_the_tokens_of_the_whole(path):
    tokenizer = load(path)
    words = "a cabbage, 12  bad\n   feed\n\nfaced " * (LONGEST_PART // 30)
    texts = ["a", words + "end", "", "x y", "c d " * (LONGEST_PART // 4 + 1)]
    found = documents(tokenizer, texts)
    expected = [ids.tolist() for ids in tokenizer.encoder.encode_batch(texts)]
    assert found == [[*ids, tokenizer.eod_id] for ids in expected]


def test_a_long_text_has_one_dummy_prefix(tmp_path, texts, monkeypatch):
    """Llama 1 and 2 have such tokenizers, which put a space before every text."""
    train = functools.partial(sentencepiece.SentencePieceTrainer.train, add_dummy_prefix=True)

    def train_with_prefix(add_dummy_prefix, **options):
        train(**options)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", train_with_prefix)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bpe(iter(texts(300)), 400, EOD))
    tokenizer = load_tokenizer(tmp_path, EOD)
    long = "abc def  gh " * (LONGEST_PART // 9)
    whole = tokenizer.encoder.encode_batch([long])[0].tolist()
    assert documents(tokenizer, ["x", long])[1] == [*whole, tokenizer.eod_id]
    assert documents(with_gigatoken(tokenizer), ["x", long])[1] == [*whole, tokenizer.eod_id]


def test_a_corpus_records_patterns_and_special_tokens_missing_in_the_file(path, tmp_path):
    tokenizer = load(path)
    tokenizer.save(tmp_path)
    file = recorded_tokenizer_file(tmp_path / tokenizer.identity.file, tokenizer.identity)
    assert file.sha256 == tokenizer.sha256
    (ids,) = file.open().encode_batch([TEXTS[0]])
    assert ids.tolist() == documents(tokenizer, TEXTS[:1])[0][:-1]
    other = dataclasses.replace(tokenizer.identity, pattern=r"\S+")
    assert recorded_tokenizer_file(file.path, other).sha256 != tokenizer.sha256


# Parts of long texts


LONGEST = 40
WORDS = st.sampled_from([*("word", "Word's", "x", "12", "1234567"), *"(é\t", "==", "//", "世界"])
SPACES = st.sampled_from([" ", " ", " ", "", "  ", "    ", "\n", "\n\n", " \n  ", "\r\n", "\t"])
# In each range of LONGEST characters, the text has a place where it can be split.
LONG_TEXTS = st.lists(st.tuples(WORDS, SPACES, WORDS, st.just(" ")), max_size=30).map(
    lambda found: "".join(part for group in found for part in group)
)


@pytest.fixture(scope="module")
def encoders(tokenizer_json, tmp_path_factory):
    path = write_tiktoken(tokenizer_json, tmp_path_factory.mktemp("long") / "a.tiktoken")
    return [load_tokenizer(path, EOD, name).encoder for name in PATTERNS]


@given(text=LONG_TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_tokens_of_the_parts_are_those_of_the_text(encoders, text):
    for encoder in encoders:
        (whole,) = encoder.encode_batch([text])
        in_parts = encoder.encode_batch(list(parts(text, False, LONGEST)))
        np.testing.assert_array_equal(np.concatenate(in_parts), whole)


# tiktoken


@pytest.fixture
def tiktoken_file(tokenizer_json, tmp_path):
    return write_tiktoken(tokenizer_json, tmp_path / "a.tiktoken")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("gpt2", "r50k_base"), ("cl100k_base", "cl100k_base"), ("o200k_base", "o200k_base")],
)
def test_patterns_split_like_those_of_the_library(name, encoding, monkeypatch):
    library = tiktoken_ext.openai_public
    monkeypatch.setattr(library, "load_tiktoken_bpe", lambda *args, **kwargs: {})  # do not download
    expected = library.ENCODING_CONSTRUCTORS[encoding]()["pat_str"]

    @given(awkward_text() | st.text())
    @settings(max_examples=500, deadline=None)
    def split_alike(text):
        assert regex.findall(PATTERNS[name], text) == regex.findall(expected, text)

    split_alike()


def test_published_files_are_recognized_by_their_hash(tiktoken_file, monkeypatch):
    content = tiktoken_file.read_bytes()
    with pytest.raises(UserError, match="--tiktoken-pattern"):
        load_tokenizer(tiktoken_file, EOD)
    assert load_tokenizer(tiktoken_file, "<eod>", r"\S+").file.special_tokens == {"<eod>": 399}
    file = PublishedFile("o200k_base", {EOD: 500})
    monkeypatch.setitem(PUBLISHED, hashlib.sha256(content).hexdigest(), file)
    for name in (None, "gpt2"):
        found = load_tokenizer(tiktoken_file, EOD, name)
        assert found.file.pattern == PATTERNS[name or "o200k_base"]
        assert found.eod_id == 500


def test_long_texts_that_tiktoken_fails_on_are_divided(tiktoken_file):
    text = " " * 1_100_000 + "x"
    tokenizer = load_tokenizer(tiktoken_file, EOD, "gpt2")
    with pytest.raises(UserError, match="tiktoken fails on a text of 1100001 characters"):
        tokenizer.encoder.encode_batch([text])
    tokens, lengths = tokenizer.encode_documents([text])
    assert np.array_equal(lengths, [len(tokens)])
    assert tokenizer.decode(tokens[:-1].tolist()) == text


def test_gpt2_files_may_have_other_names_and_orders(tokenizer_json, tmp_path):
    """The names of the files differ in transformers, Megatron-LM and the first release of GPT-2."""
    vocab_file = write_gpt2_files(tokenizer_json, tmp_path)
    expected = tokenizer_json_of(vocab_file)
    assert tokenizer_json_of(write_gpt2_files(tokenizer_json, tmp_path, "gpt2-")) == expected
    merges_file = (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    merges_file.write_text(merges_file.read_text().replace("\n", "\n\n", 3) + "\n")
    vocab = json.loads(vocab_file.read_text())
    vocab_file.write_text(json.dumps(dict(reversed(vocab.items()))))
    first_release = vocab_file.rename(tmp_path / "encoder.json")
    assert tokenizer_json_of(first_release) == expected
    assert load_tokenizer(tmp_path, EOD).path == first_release


BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.tiktoken", BYTES + b"Y*I= 256\n", "is not a tiktoken file"),
        ("tokenizer.json", b"{}", "tokenizer.json is not"),
        ("tokenizer.model", b"{}", "tokenizer.model is not"),
        ("merges.txt", b"#version: 0.2\nzzz a\n", "merges.txt are not files"),
        ("vocab.json", b'{"a": 1}', "are not files"),
    ],
)
def test_damaged_files_are_rejected(tokenizer_json, tmp_path, name, content, problem):
    path = tmp_path / name
    if name in ("vocab.json", "merges.txt"):
        path = write_gpt2_files(tokenizer_json, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        load_tokenizer(path, EOD, "gpt2" if name == "a.tiktoken" else None)


# Folders of Hugging Face models


@pytest.mark.parametrize(
    ("files", "eod"),
    [
        ({}, EOD),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, "</s>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "lstrip": False}}}, "</s>"),
        ({"tokenizer_config.json": {"eos_token": None}}, EOD),
        ({"config.json": {"eos_token_id": 500}}, "</s>"),
        ({"config.json": {"eos_token_id": [500, 501]}}, "</s>"),
        # the default of transformers, which is an ordinary token here
        ({"config.json": {"eos_token_id": 2}}, EOD),
        ({"tokenizer_config.json": {"eos_token": EOD}, "config.json": {"eos_token_id": 500}}, EOD),
    ],
)
def test_the_default_end_of_document_token_is_that_of_the_folder(
    tokenizer_json, tmp_path, files, eod
):
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    library.add_special_tokens([f"<{n}>" for n in range(500 - library.get_vocab_size())])
    library.add_special_tokens(["</s>", "<|eot_id|>"])
    folder = tmp_path / "model"
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    for name, body in files.items():
        (folder / name).write_text(json.dumps(body))
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.eod_token, tokenizer.eod_id) == (eod, library.token_to_id(eod))
    assert load_tokenizer(folder, "<|eot_id|>").eod_token == "<|eot_id|>"


def test_llama_2s_folder_is_read_with_and_without_its_tokenizer_json(tmp_path, tokenizer_json):
    model = sentencepiece_bpe(iter(TEXTS * 20), 320, EOD)
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.file.kind, tokenizer.eod_token) == ("sentencepiece", "</s>")
    tokens, lengths = tokenizer.encode_documents(["abc </s>"])
    assert list(tokens).count(tokenizer.eod_id) == 1
    assert tokens[lengths[0] - 1] == tokenizer.eod_id
    shutil.copy(tokenizer_json, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path, EOD).file.kind == "tokenizers"


# Training


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_training_gives_the_same_file_in_another_process(jsonl, texts, tmp_path, name):
    """The file must not depend on the hash seed, which differs between processes."""
    path, output = str(jsonl("a.jsonl", texts(300))), tmp_path / name
    options = TrainTokenizerOptions(SourceOptions(((path,),)), output, vocab_size=500)
    train_tokenizer(options)
    first = output.read_bytes()
    assert load_tokenizer(output, EOD).vocab_size == 500
    with pytest.raises(UserError, match="--overwrite"):
        train_tokenizer(options)
    command = [sys.executable, "tools/train_tokenizer.py", "--input", path, "--overwrite"]
    command += ["--output", str(output), "--vocab-size", "500"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "3"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert output.read_bytes() == first


def test_a_folder_may_hold_the_tokenizer_of_a_corpus_in_two_formats(tmp_path):
    own = tmp_path / "tokenizer.model"
    own.write_bytes(b"a model")
    file = TokenizerFile(own, "sentencepiece", b"a model")
    identity = TokenizerIdentity("sentencepiece", file.name, file.sha256, 9, 0)
    folder = tmp_path / "model"
    folder.mkdir()
    assert same_ids(identity, own, folder) is None
    (folder / "tokenizer.json").write_text("{}")
    assert same_ids(identity, own, folder) is False
    for content, expected in ((b"a model", True), (b"another", False)):
        (folder / "tokenizer.model").write_bytes(content)
        assert same_ids(identity, own, folder) is expected
