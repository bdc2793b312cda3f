"""gigatoken gives the ids of the tokenizer's own library, or is not used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import unicodedata
import warnings

import numpy as np
import orjson
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import gigatoken, preprocess
from megatron_chameleon.corpus.gigatoken import (
    difficult_texts,
    gigatoken_for,
    is_stable,
    with_encoder,
    with_gigatoken,
)
from megatron_chameleon.corpus.options import EncoderOptions
from megatron_chameleon.corpus.tokenizer import PATTERNS, load_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import make_corpus
from tests.unit.corpus.tokenizer_samples import (
    EOD,
    awkward_text,
    write_gpt2_files,
    write_pairs,
    write_tiktoken,
)

PAIRS = {f"pairs {name}": name for name in PATTERNS}


@pytest.fixture(scope="module", params=["json", "model", "gpt2 files", *PATTERNS, *PAIRS])
def tokenizer(request, tokenizer_json, sentencepiece_model, tmp_path_factory):
    """One tokenizer per format. In PAIRS, tokens depend on how text is split into words."""
    folder = tmp_path_factory.mktemp("fast")
    if request.param in PAIRS:
        return load_tokenizer(write_pairs(folder / "a.tiktoken"), EOD, PAIRS[request.param])
    if request.param in PATTERNS:
        path = write_tiktoken(tokenizer_json, folder / "a.tiktoken")
        return load_tokenizer(path, EOD, request.param)
    if request.param == "gpt2 files":
        return load_tokenizer(write_gpt2_files(tokenizer_json, folder), EOD)
    return load_tokenizer(tokenizer_json if request.param == "json" else sentencepiece_model, EOD)


@pytest.fixture(scope="module")
def fast(tokenizer):
    return with_gigatoken(tokenizer)


def assert_encoded_alike(fast, texts):
    found, own = fast.encode_documents(texts), dataclasses.replace(fast, fast_encoder=None)
    for ours, expected in zip(found, own.encode_documents(texts), strict=True):
        np.testing.assert_array_equal(ours, expected)
    return found


def test_gigatoken_is_used_where_ids_agree_and_no_text_ends_a_document(tokenizer, texts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = with_encoder(tokenizer, "auto", texts(200))
    assert chosen.fast_encoder is not None
    assert chosen.identity == tokenizer.identity
    assert_encoded_alike(chosen, texts(300))
    assert_encoded_alike(chosen, difficult_texts(tokenizer.encoder.special_tokens()))
    end = gigatoken._END
    found = [f"a{end}b", end, end[:5], end[5:], end[:-1], end * 2, f"a{EOD}b</s><s>", EOD]
    ids, lengths = assert_encoded_alike(chosen, found)
    assert np.count_nonzero(ids == tokenizer.eod_id) == len(found)
    assert lengths.sum() == len(ids)


@given(found=st.lists(st.text(max_size=60) | awkward_text(), min_size=1, max_size=15))
@settings(max_examples=60, deadline=None)
def test_gigatoken_and_the_own_library_encode_any_text_alike(fast, found):
    assert_encoded_alike(fast, found)


def test_the_own_library_encodes_unstable_characters(tokenizer_json, tmp_path):
    """The tokens depend on whether a library's Unicode tables define the character as a letter."""
    letters = [chr(n) for n in range(0x10940, 0x10960)]  # Unicode 17 adds letters of Sidetic
    content = json.loads(tokenizer_json.read_text())
    model = content["model"]
    model["vocab"]["að"] = len(model["vocab"])  # 'a' and the first byte of such characters
    model["merges"].append(["a", "ð"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path, EOD)
    texts = [f"a{letter}" for letter in letters]
    assert_encoded_alike(with_gigatoken(tokenizer), texts)
    encode = gigatoken_for(tokenizer.file, tokenizer.eod_id)
    own = tokenizer.encoder.encode_batch(texts)
    assert any(
        len(ids) != len(encode(text.encode())) for ids, text in zip(own, texts, strict=True)
    ), "the libraries agree: the fallback is no longer needed"


@pytest.fixture
def disagreeing(tokenizer_json):
    """A tokenizer whose file has two ids swapped, compared with the file that its encoder read."""
    tokenizer = load_tokenizer(tokenizer_json, EOD)
    content = orjson.loads(tokenizer.file.content)
    vocab = content["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    file = dataclasses.replace(tokenizer.file, content=orjson.dumps(content))
    return dataclasses.replace(tokenizer, file=file)


def test_the_own_library_encodes_a_corpus_where_ids_disagree(
    disagreeing, jsonl, monkeypatch, preprocessing
):
    monkeypatch.setattr(gigatoken, "difficult_texts", lambda special_tokens: [])
    monkeypatch.setattr(preprocess, "_load_tokenizer", lambda options: disagreeing)
    path = jsonl("a.jsonl", [f"here is a Q and {i}" for i in range(40)])

    def corpus(encoder):
        encoding = EncoderOptions(encoder=encoder)
        return make_corpus(
            preprocessing(f"a={path}", output=encoder, encoding=encoding, shard_bytes=256)
        )

    own = corpus("own")
    with pytest.warns(UserWarning, match="differently"):
        assert corpus("auto").domains == own.domains  # domains include checksums of their files
    with pytest.raises(UserError, match="--encoder own"):
        corpus("gigatoken")


def test_a_difference_found_while_encoding_is_an_error(disagreeing, monkeypatch):
    monkeypatch.setattr(gigatoken, "_COMPARE_EVERY", 1000)
    fast = with_gigatoken(disagreeing)
    fast.encode_documents(["plain words " * 100] * 3)
    fast.encode_documents(["a Q"])  # not compared, so soon after the last comparison
    with pytest.raises(UserError, match="--encoder own"):
        fast.encode_documents(["Q " * 5000])


def test_two_releases_of_unicode_agree_on_stable_characters(monkeypatch):
    """Compare the Unicode release of Python with the newer release of the regex package."""
    everything = "".join(chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000)
    own = [unicodedata.category(character)[0] for character in everything]
    differing: set[str] = set()
    for kind in "LNMZ":
        newer = set(regex.findall(rf"\p{{{kind}}}", everything))
        differing |= newer ^ set(itertools.compress(everything, map(kind.__eq__, own)))
    assert not [c for c in differing if is_stable(c)]
    assert differing, "both use the same release: nothing was compared"
    # Imitate a Python with a newer Unicode release.
    monkeypatch.setattr(unicodedata, "category", lambda character: "Lo")
    assert [is_stable(c) for c in "a世\u1c89\U00011f04"] == [True, True, False, False]
