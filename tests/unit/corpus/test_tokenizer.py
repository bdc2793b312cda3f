from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
import tokenizers

from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError

EOD = "<|endoftext|>"
TEXTS = [
    "abc def\n\n    indented\tby tab  \r\n",
    "Grüße, 世界 🌍 \u0000 \u200b",
    f"a document about {EOD} and </s>",
    "",
    "x",
]


@pytest.fixture(params=["tokenizers", "sentencepiece"])
def path(request, tokenizer_json, sentencepiece_model):
    return {"tokenizers": tokenizer_json, "sentencepiece": sentencepiece_model}[request.param]


def test_any_text_decodes_to_itself(path):
    tokenizer = load_tokenizer(path, EOD)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids[:-1].tolist()) == text


def test_each_text_ends_in_one_end_of_document_token(path):
    tokenizer = load_tokenizer(path, EOD)
    for ids in tokenizer.encode_batch(TEXTS):
        assert ids.dtype == np.int32
        assert np.flatnonzero(ids == tokenizer.eod_id).tolist() == [ids.size - 1]
        assert ids.min() >= 0
        assert ids.max() < tokenizer.vocab_size


def test_a_batch_is_what_its_texts_are_alone(path):
    tokenizer = load_tokenizer(path, EOD)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode_batch([text])[0])
    assert tokenizer.encode_batch([]) == []


def test_identity(path):
    identity = load_tokenizer(path, EOD).identity
    assert identity.file == path.name
    assert identity.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert identity.vocab_size == 400


def test_a_folder_stands_for_the_file_in_it(path, tmp_path):
    shutil.copy(path, tmp_path)
    assert load_tokenizer(tmp_path, EOD).path == tmp_path / path.name


def test_a_folder_with_none_or_both_is_refused(tmp_path, tokenizer_json, sentencepiece_model):
    with pytest.raises(UserError, match=r"holds neither of tokenizer\.json and tokenizer\.model"):
        load_tokenizer(tmp_path, EOD)
    shutil.copy(tokenizer_json, tmp_path)
    shutil.copy(sentencepiece_model, tmp_path)
    with pytest.raises(UserError, match="holds both"):
        load_tokenizer(tmp_path, EOD)


def test_a_missing_end_of_document_token_is_told_with_candidates(path):
    candidate = r"</s>" if path.suffix == ".model" else r"<\|endoftext\|>"
    with pytest.raises(UserError, match=rf"no token '<eod>'.*{candidate}.*--eod-token"):
        load_tokenizer(path, "<eod>")


def test_another_token_can_end_documents(sentencepiece_model):
    assert load_tokenizer(sentencepiece_model, "</s>").eod_id == 2


def test_settings_of_truncation_and_padding_are_not_used(tokenizer_json, tmp_path):
    cutting = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    cutting.enable_truncation(max_length=4)
    cutting.enable_padding(length=8)
    cutting.save(str(tmp_path / "cutting.json"))
    texts = ["a b c d e f g h i j k l", "a"]
    expected = load_tokenizer(tokenizer_json, EOD).encode_batch(texts)
    for ids, other in zip(
        load_tokenizer(tmp_path / "cutting.json", EOD).encode_batch(texts), expected, strict=True
    ):
        np.testing.assert_array_equal(ids, other)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name):
    (tmp_path / name).write_text('{"weights": {}}')
    with pytest.raises(UserError, match=f"{name} is not a "):
        load_tokenizer(tmp_path / name, EOD)


def test_a_file_of_another_kind_or_none_is_refused(tmp_path):
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(UserError, match=r"a tokenizer is a tokenizer\.json or a SentencePiece"):
        load_tokenizer(tmp_path / "vocab.txt", EOD)
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "absent.json", EOD)
