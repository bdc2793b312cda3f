from __future__ import annotations

import base64
import hashlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given, settings

from megatron_chameleon.corpus.encoders import (
    PATTERNS,
    PUBLISHED,
    PublishedFile,
    TiktokenEncoder,
    is_tiktoken,
    pattern_and_special_tokens,
    read_ranks,
)
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.tokenizer_samples import awkward_text, write_tiktoken

EOD = "<|endoftext|>"
BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
TEXTS = [
    "It's we'LL 12345 Words, in  two   spaces\r\n\n\t x=y; ",
    "camelCase ÄÖÜ čeština 世界 🌍\u00a0!! //\n/",
    "  \n \n  trailing   ",
]


@pytest.fixture
def path(tokenizer_json, tmp_path):
    return write_tiktoken(tokenizer_json, tmp_path / "a.tiktoken")


@pytest.mark.parametrize("name", PATTERNS)
def test_the_ids_are_those_of_the_library(path, name):
    pattern = PATTERNS[name]
    encoder = TiktokenEncoder(path, path.read_bytes(), pattern, {EOD: 399})
    library = tiktoken.Encoding(
        "a",
        pat_str=pattern,
        mergeable_ranks=read_ranks(path, path.read_bytes()),
        special_tokens={},
    )
    for text, ids in zip(TEXTS, encoder.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == library.encode(text)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("gpt2", "r50k_base"), ("cl100k_base", "cl100k_base"), ("o200k_base", "o200k_base")],
)
def test_the_patterns_split_as_those_in_the_library(name, encoding, monkeypatch):
    library = tiktoken_ext.openai_public
    monkeypatch.setattr(library, "load_tiktoken_bpe", lambda *args, **kwargs: {})  # a download
    expected = library.ENCODING_CONSTRUCTORS[encoding]()["pat_str"]
    characters = "".join(map(chr, range(32, 0x500)))
    for text in [*TEXTS, characters, "a" * 50 + " " * 50 + "\n" * 9 + "x"]:
        assert regex.findall(PATTERNS[name], text) == regex.findall(expected, text)

    @given(awkward_text())
    @settings(max_examples=500, deadline=None)
    def split_alike(text):
        assert regex.findall(PATTERNS[name], text) == regex.findall(expected, text)

    split_alike()


def test_special_tokens_are_not_read_out_of_the_text(path):
    encoder = TiktokenEncoder(path, path.read_bytes(), PATTERNS["gpt2"], {EOD: 399})
    assert encoder.token_id(EOD) == 399
    assert encoder.special_tokens() == [EOD]
    assert 399 not in encoder.encode_batch([f"a{EOD}b"])[0]
    assert encoder.decode([*encoder.encode_batch(["ab"])[0], 399]) == f"ab{EOD}"
    assert encoder.token_id("a") == read_ranks(path, path.read_bytes())[b"a"]
    assert encoder.token_id("no such token") is None


def test_what_is_published_is_known_by_its_hash(path):
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    published = {sha256: PublishedFile("o200k_base", {EOD: 500}, 399)}
    known = pattern_and_special_tokens(path, content, None, "<eod>", published)
    assert known == (PATTERNS["o200k_base"], {EOD: 500})
    given = pattern_and_special_tokens(path, content, "gpt2", "<eod>", published)
    assert given == (PATTERNS["gpt2"], {EOD: 500})
    with pytest.raises(UserError, match=r"--tiktoken-pattern gpt2, .*it holds 399 ranks$"):
        pattern_and_special_tokens(path, content, None, EOD)
    with pytest.raises(UserError, match=r"399 ranks, as many as the file of o200k_base$"):
        pattern_and_special_tokens(path, content + b"\n", None, EOD, published)
    own = pattern_and_special_tokens(path, content, r"\S+|\s+", "<eod>")
    assert own == (r"\S+|\s+", {"<eod>": 399})


def test_what_is_known_of_published_files_is_what_the_library_knows():
    source = inspect.getsource(tiktoken_ext.openai_public)
    llama3 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
    assert [sha256 for sha256 in PUBLISHED if sha256 not in source] == [llama3]
    for file in PUBLISHED.values():
        assert file.pattern in PATTERNS
        assert len(set(file.special_tokens.values())) == len(file.special_tokens)
    assert set(PUBLISHED[llama3].special_tokens.values()) == set(range(128_000, 128_256))
    assert PUBLISHED[llama3].special_tokens["<|end_of_text|>"] == 128_001


def test_a_file_is_told_by_its_content(path, sentencepiece_model, tmp_path):
    """Llama 3's tokenizer.model is such a file, not a SentencePiece model."""
    assert is_tiktoken(BYTES)
    assert not is_tiktoken(sentencepiece_model.read_bytes())
    assert not is_tiktoken(b"")
    model = path.rename(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(model, EOD, "llama3")
    assert tokenizer.identity.kind == "tiktoken"
    assert tokenizer.identity.pattern == PATTERNS["llama3"]
    assert tokenizer.identity.special_tokens == {EOD: 399}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (BYTES + b"YWI=\n", r":257 is not a base64 string and its rank"),
        (BYTES + b"Y*I= 256\n", r":257 is not a base64 string and its rank"),
        (BYTES[:-9], r"is not a tiktoken file \(the byte 255 has no rank\)"),
        (BYTES + b"YWI= 7\n", r"two byte strings have the same rank"),
        (b"", r"the byte 0 has no rank"),
    ],
)
def test_what_is_no_such_file_is_refused(content, problem, tmp_path):
    path = tmp_path / "a.tiktoken"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        load_tokenizer(path, EOD, "gpt2")


def test_a_text_that_the_library_gives_up_on_is_told(path):
    encoder = TiktokenEncoder(path, path.read_bytes(), PATTERNS["gpt2"], {EOD: 399})
    with pytest.raises(UserError, match="tiktoken fails on a text of 1100001 characters"):
        encoder.encode_batch([" " * 1_100_000 + "x"])
    tokenizer = load_tokenizer(Path(path), EOD, "gpt2")
    tokens, lengths = tokenizer.encode_documents([" " * 1_100_000 + "x"])
    assert np.array_equal(lengths, [len(tokens)])
    assert tokenizer.decode(tokens[:-1].tolist()) == " " * 1_100_000 + "x"
