from __future__ import annotations

import dataclasses
import json
import sys
import unicodedata
import warnings

import numpy as np
import orjson
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import gigatoken as fast_encoder
from megatron_chameleon.corpus import preprocess
from megatron_chameleon.corpus.encoders import PATTERNS
from megatron_chameleon.corpus.gigatoken import (
    GigatokenEncoder,
    difficult_texts,
    gigatoken_for,
    with_encoder,
    with_gigatoken,
)
from megatron_chameleon.corpus.options import EncoderOptions, PreprocessOptions
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import files_of, made
from tests.unit.corpus.corpus_making import given as given_inputs
from tests.unit.corpus.tokenizer_samples import (
    awkward_text,
    write_gpt2_files,
    write_pairs,
    write_tiktoken,
)

EOD = "<|endoftext|>"


@pytest.fixture(scope="module", params=["json", "model", "gpt2 files", *PATTERNS])
def tokenizer(request, tokenizer_json, sentencepiece_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fast")
    if request.param in PATTERNS:
        path = write_tiktoken(tokenizer_json, folder / "a.tiktoken")
        return load_tokenizer(path, EOD, request.param)
    if request.param == "gpt2 files":
        return load_tokenizer(write_gpt2_files(tokenizer_json, folder), EOD)
    return load_tokenizer(tokenizer_json if request.param == "json" else sentencepiece_model, EOD)


@pytest.fixture
def json_tokenizer(tokenizer_json):
    return load_tokenizer(tokenizer_json, EOD)


def both(tokenizer, texts):
    """Documents encoded by gigatoken and by the own library."""
    fast = with_gigatoken(tokenizer).encode_documents(texts)
    return fast, tokenizer.encode_documents(texts)


def assert_same(fast, own):
    np.testing.assert_array_equal(fast[0], own[0])
    np.testing.assert_array_equal(fast[1], own[1])


def test_it_is_taken_where_it_agrees(tokenizer, texts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = with_encoder(tokenizer, "auto", texts(200))
    assert isinstance(chosen.fast_encoder, GigatokenEncoder)
    assert chosen.identity == tokenizer.identity
    assert_same(chosen.encode_documents(texts(300)), tokenizer.encode_documents(texts(300)))


def test_awkward_texts_are_encoded_alike(tokenizer):
    assert_same(*both(tokenizer, difficult_texts(tokenizer.encoder.special_tokens())))


@given(found=st.lists(st.text(max_size=60) | awkward_text(), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_texts_are_encoded_alike(tokenizer, found):
    assert_same(*both(tokenizer, found))


@pytest.fixture(scope="module", params=PATTERNS)
def pairs_tokenizer(request, tmp_path_factory):
    """A tokenizer in whose tokens it shows where a text is split into words."""
    path = write_pairs(tmp_path_factory.mktemp("pairs") / "a.tiktoken")
    return load_tokenizer(path, EOD, request.param)


@given(found=st.lists(awkward_text(), min_size=20, max_size=40))
@settings(max_examples=100, deadline=None)
def test_texts_are_split_into_words_alike_where_it_is_taken(pairs_tokenizer, found):
    assert_same(*both(pairs_tokenizer, found))


def test_special_tokens_in_the_text_end_no_document(tokenizer):
    ids, lengths = with_gigatoken(tokenizer).encode_documents([f"a{EOD}b</s><s>", EOD])
    assert np.count_nonzero(ids == tokenizer.eod_id) == 2
    assert lengths.sum() == len(ids)


def test_a_text_that_holds_what_ends_documents_for_it_ends_none(tokenizer):
    end = fast_encoder._END
    found = [f"a{end}b", end, f"{end[:5]}", end[5:], f"{end[:-1]}", "plain", f"{end}{end}"]
    fast, own = both(tokenizer, found)
    assert_same(fast, own)
    assert np.count_nonzero(fast[0] == tokenizer.eod_id) == len(found)


def test_characters_that_not_all_releases_of_unicode_know_are_left_to_the_own_library(
    tokenizer_json, tmp_path
):
    """A tokenizer in which it shows whether a character is a letter for the library."""
    letters = [chr(n) for n in range(0x10940, 0x10960)]  # of Sidetic, in Unicode 17
    assert {unicodedata.category(letter) for letter in letters} <= {"Cn", "Lo"}
    content = json.loads(tokenizer_json.read_text())
    model = content["model"]
    model["vocab"]["að"] = len(model["vocab"])  # 'a' and the first byte of what lies that high
    model["merges"].append(["a", "ð"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path, EOD)
    texts = [f"a{letter}" for letter in letters]
    assert_same(*both(tokenizer, texts))
    encode = gigatoken_for(tokenizer.file, tokenizer.eod_id)
    own = tokenizer.encoder.encode_batch(texts)
    differing = [
        ids for ids, text in zip(own, texts, strict=True) if len(ids) != len(encode(text.encode()))
    ]
    assert differing, "the libraries agree by now: is the detour still needed?"


def test_own_and_a_missing_package_take_the_own_library(json_tokenizer, texts, monkeypatch):
    assert with_encoder(json_tokenizer, "own", texts(5)).fast_encoder is None
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    said = "gigatoken package is not installed: using tokenizers, which is slower"
    with pytest.warns(UserWarning, match=said) as warned:
        assert with_encoder(json_tokenizer, "auto", texts(5)).fast_encoder is None
    assert len(warned) == 1
    with pytest.raises(UserError, match=r"--encoder gigatoken: the .* not installed; use --enco"):
        with_encoder(json_tokenizer, "gigatoken", texts(5))
    with pytest.raises(UserError, match="not installed; use --encoder own"):
        with_gigatoken(json_tokenizer)


def test_a_tokenizer_that_it_does_not_take_is_encoded_by_its_own_library(tmp_path, texts):
    words = {word: i for i, word in enumerate([EOD, "[UNK]", *" ".join(texts(20)).split()])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, EOD)
    with pytest.warns(
        UserWarning, match=r"gigatoken does not support .*tokenizer\.json \(.*slower"
    ):
        chosen = with_encoder(tokenizer, "auto", texts(20))
    assert_same(chosen.encode_documents(texts(20)), tokenizer.encode_documents(texts(20)))


def other_vocabulary(tokenizer_json):
    """The same entries with two ids exchanged: it disagrees where one of them comes up."""
    content = orjson.loads(tokenizer_json.read_bytes())
    vocab = content["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    return orjson.dumps(content)


@pytest.fixture
def disagreeing(tokenizer_json):
    """A tokenizer whose file is not the one that its own library has opened."""
    tokenizer = load_tokenizer(tokenizer_json, EOD)
    file = dataclasses.replace(tokenizer.file, content=other_vocabulary(tokenizer_json))
    return dataclasses.replace(tokenizer, file=file)


def test_one_that_disagrees_is_not_taken(disagreeing, texts, monkeypatch):
    with pytest.warns(UserWarning, match="gigatoken and tokenizers encode .* differently: using"):
        assert with_encoder(disagreeing, "auto", texts(5)).fast_encoder is None
    monkeypatch.setattr(fast_encoder, "difficult_texts", lambda special_tokens: [])
    assert with_encoder(disagreeing, "auto", texts(5)).fast_encoder is not None
    with pytest.warns(UserWarning, match="encode 'here is a Q' differently"):
        assert with_encoder(disagreeing, "auto", [*texts(5), "here is a Q"]).fast_encoder is None
    with pytest.raises(UserError, match=r"--encoder gigatoken: .*differently; use --encoder own"):
        with_encoder(disagreeing, "gigatoken", ["here is a Q"])


@pytest.mark.parametrize("shard_bytes", [256, 1 << 20])
def test_a_corpus_whose_text_they_encode_otherwise_is_that_of_the_own_library(
    disagreeing, monkeypatch, tmp_path, shard_bytes
):
    monkeypatch.setattr(fast_encoder, "difficult_texts", lambda special_tokens: [])
    monkeypatch.setattr(preprocess, "_load_tokenizer", lambda options: disagreeing)
    lines = [json.dumps({"text": f"here is a Q and {i}"}) + "\n" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def options(encoder, output):
        return PreprocessOptions(
            given_inputs(f"a={tmp_path / 'a.jsonl'}"),
            tmp_path / output,
            tmp_path / "not-read.json",
            encoding=EncoderOptions(encoder=encoder),
            split="60,20,20",
            workers=1,
            shard_bytes=shard_bytes,
        )

    own = made(options("own", "own"))
    with pytest.warns(UserWarning, match="encode 'here is a Q and .*differently: using tokenizers"):
        trusted = made(options("auto", "auto"))
    files = [{k: v for k, v in files_of(c).items() if "tokens" in k} for c in (own, trusted)]
    assert len(files[0]) == 9  # .bin, .idx and .xxh3 of three splits
    assert files[0] == files[1]
    assert own.domains == trusted.domains
    with pytest.raises(UserError, match=r"--encoder gigatoken: .* differently; use --encoder own"):
        made(options("gigatoken", "gigatoken"))
    assert not (tmp_path / "gigatoken" / "corpus.json").exists()


def test_a_difference_that_shows_later_ends_the_run(disagreeing, monkeypatch):
    monkeypatch.setattr(fast_encoder, "_COMPARE_EVERY", 1000)
    fast = with_gigatoken(disagreeing)
    fast.encode_documents(["plain words " * 100] * 3)
    fast.encode_documents(["a Q"])  # too soon after the last comparison
    with pytest.raises(UserError, match=r"'Q Q Q .*differently: remove the unfinished"):
        fast.encode_documents(["Q " * 5000])


def test_its_memory_is_given_back_when_it_has_grown(json_tokenizer, monkeypatch):
    monkeypatch.setattr(fast_encoder, "_MAX_GROWTH_BYTES", -(1 << 40))
    monkeypatch.setattr(fast_encoder, "_LOOK_EVERY", 100)
    fast = with_gigatoken(json_tokenizer)
    assert isinstance(fast.fast_encoder, GigatokenEncoder)
    loaded = fast.fast_encoder._gigatoken
    fast.encode_documents(["abc"])
    assert fast.fast_encoder._gigatoken is loaded
    before = fast.encode_documents(["abc def " * 20])
    assert fast.fast_encoder._gigatoken is not loaded
    assert_same(fast.encode_documents(["abc def " * 20]), before)


def test_what_it_gives_up_on_is_told(json_tokenizer, monkeypatch):
    class PanicException(BaseException):
        pass

    def give_up(text):
        raise PanicException("index out of bounds")

    fast = with_gigatoken(json_tokenizer)
    monkeypatch.setattr(fast.fast_encoder, "_gigatoken", give_up)
    with pytest.raises(UserError, match=r"fails on texts of up to 3 char.*use --encoder own"):
        fast.encode_documents(["abc"])
