from __future__ import annotations

import dataclasses
import io
import os
import shutil

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megatron_chameleon.corpus.gigatoken import with_gigatoken
from megatron_chameleon.corpus.tokenizer import (
    LONGEST_PART,
    Tokenizer,
    load_tokenizer,
    recorded_tokenizer_file,
)
from megatron_chameleon.errors import UserError
from tests.unit.corpus.tokenizer_samples import write_gpt2_files, write_tiktoken

EOD = "<|endoftext|>"
TEXTS = [
    "abc def\n\n    indented\tby tab  \r\n",
    "Grüße, 世界 🌍 \u0000 \u200b",
    f"a document about {EOD} and </s>",
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


def load(path) -> Tokenizer:
    return load_tokenizer(path, EOD, "gpt2" if path.suffix == ".tiktoken" else None)


def documents(tokenizer, texts):
    """The ids of each text, its end included."""
    tokens, lengths = tokenizer.encode_documents(texts)
    assert tokens.dtype == tokenizer.token_type
    assert lengths.dtype == np.int32
    assert len(lengths) == len(texts)
    assert lengths.sum() == len(tokens)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_any_text_decodes_to_itself(path):
    tokenizer = load(path)
    for text, ids in zip(TEXTS, documents(tokenizer, TEXTS), strict=True):
        assert tokenizer.decode(ids[:-1]) == text


def test_each_text_ends_in_one_end_of_document_token(path):
    tokenizer = load(path)
    for ids in documents(tokenizer, TEXTS):
        assert ids.index(tokenizer.eod_id) == len(ids) - 1
        assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size


def test_texts_together_are_what_they_are_alone(path):
    tokenizer = load(path)
    alone = [documents(tokenizer, [text])[0] for text in TEXTS]
    assert documents(tokenizer, TEXTS) == alone
    tokens, lengths = tokenizer.encode_documents([])
    assert tokens.shape == lengths.shape == (0,)


def test_a_byte_level_bpe_gives_the_same_ids_in_every_form(tokenizer_json, tmp_path):
    expected = documents(load(tokenizer_json), TEXTS)
    assert documents(load(write_gpt2_files(tokenizer_json, tmp_path)), TEXTS) == expected
    tiktoken = documents(load(write_tiktoken(tokenizer_json, tmp_path / "a.tiktoken")), TEXTS)
    # There the end-of-document token comes last, not first.
    assert [[1 + i for i in ids[:-1]] + [0] for ids in tiktoken] == expected


def test_a_long_text_is_encoded_in_parts_and_as_it_would_be_in_one(path):
    tokenizer = load(path)
    words = "a cabbage, 12  bad\n   feed\n\nfaced " * (LONGEST_PART // 30)
    long, short = words + "end", "short"
    assert len(long) > LONGEST_PART
    parted, alone = documents(tokenizer, [long, short])
    assert parted[:-1] == tokenizer.encoder.encode_batch([long])[0].tolist()
    assert [alone] == documents(tokenizer, [short])


def test_a_space_put_before_every_text_comes_once_in_a_long_one(tmp_path, texts):
    """As in the models of Llama 1 and 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300)),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        control_symbols=[EOD],
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path, EOD)
    long = "abc def  gh " * (LONGEST_PART // 9)
    whole = tokenizer.encoder.encode_batch([long])[0].tolist()
    assert documents(tokenizer, ["x", long])[1] == [*whole, tokenizer.eod_id]
    assert documents(with_gigatoken(tokenizer), ["x", long])[1] == [*whole, tokenizer.eod_id]


def test_long_and_short_texts_keep_their_order(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json, EOD)
    found = ["a" * 500_001, "b", "c d " * 250_001, "", "e f " * 130_000]
    together = documents(tokenizer, found)
    assert together == [documents(tokenizer, [text])[0] for text in found]
    assert [ids.count(tokenizer.eod_id) for ids in together] == [1] * len(found)


def test_a_document_of_more_tokens_than_the_format_can_tell_is_refused(tokenizer_json):
    class Endless:
        """Encodes a text as 2^31 times the same token, in no memory."""

        def encode_documents(self, texts):
            return None

        def encode_batch(self, texts):
            return [np.broadcast_to(np.uint32(7), 2**31) for _ in texts]

    tokenizer = dataclasses.replace(load_tokenizer(tokenizer_json, EOD), fast_encoder=Endless())
    with pytest.raises(UserError, match="2147483649 tokens, more than the 2147483647 of"):
        tokenizer.encode_documents(["a"])


def test_ids_beyond_16_bits_are_kept(tokenizer_json, tmp_path):
    path = write_tiktoken(tokenizer_json, tmp_path / "big.tiktoken")
    path.write_bytes(path.read_bytes() + b"YWJjZGVmZ2g= 70000\n")
    tokenizer = load_tokenizer(path, EOD, "gpt2")
    assert tokenizer.token_type == "int32"
    assert documents(tokenizer, ["abcdefgh"]) == [[70_000, 70_001]]


def test_the_hash_covers_what_a_tiktoken_file_does_not_say(tokenizer_json, tmp_path):
    path = write_tiktoken(tokenizer_json, tmp_path / "a.tiktoken")
    pairs = [(EOD, "gpt2"), (EOD, "cl100k_base"), ("<eod>", "gpt2")]
    hashes = {load_tokenizer(path, eod, pattern).sha256 for eod, pattern in pairs}
    assert len(hashes) == 3
    assert load_tokenizer(path, EOD, "cl100k_base").sha256 in hashes


def test_what_a_corpus_has_recorded_opens_its_file(path, tmp_path):
    """Without being told the pattern again."""
    tokenizer = load(path)
    folder = tmp_path / "corpus"
    folder.mkdir()
    tokenizer.save(folder)
    file = recorded_tokenizer_file(folder / tokenizer.identity.file, tokenizer.identity)
    assert file.sha256 == tokenizer.sha256
    (ids,) = file.open().encode_batch([TEXTS[0]])
    assert ids.tolist() == documents(tokenizer, TEXTS[:1])[0][:-1]
    other = dataclasses.replace(tokenizer.identity, pattern=r"\S+")
    assert recorded_tokenizer_file(folder, other).sha256 != tokenizer.sha256


def test_a_folder_stands_for_the_file_in_it(path, tmp_path):
    if path.parent != tmp_path:
        shutil.copy(path, tmp_path)
    pattern = "gpt2" if path.suffix == ".tiktoken" else None
    assert load_tokenizer(tmp_path, EOD, pattern).path == tmp_path / path.name


def test_a_folder_with_none_or_several_is_refused(tmp_path, tokenizer_json, sentencepiece_model):
    with pytest.raises(UserError, match=r"holds no tokenizer: none of tokenizer\.json, "):
        load_tokenizer(tmp_path, EOD)
    shutil.copy(tokenizer_json, tmp_path)
    write_gpt2_files(tokenizer_json, tmp_path)
    assert load_tokenizer(tmp_path, EOD).path.name == "tokenizer.json"
    shutil.copy(sentencepiece_model, tmp_path)
    with pytest.raises(UserError, match=r"more than one .*tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path, EOD)


def test_a_missing_end_of_document_token_is_told_with_candidates(path):
    if path.suffix == ".tiktoken":  # one that is not known has the token that is asked for
        assert load_tokenizer(path, "<eod>", "gpt2").eod_id == 399
        return
    candidate = r"</s>" if path.suffix == ".model" else r"<\|endoftext\|>"
    with pytest.raises(UserError, match=rf"no token '<eod>'.*{candidate}.*--eod-token"):
        load_tokenizer(path, "<eod>")


def test_a_token_that_is_found_in_text_is_told(tokenizer_json, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tokenizer.add_tokens(["<eod>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="recognizes '<eod>' in text"):
        load_tokenizer(tmp_path, "<eod>")


def test_settings_of_truncation_and_padding_are_not_used(tokenizer_json, tmp_path):
    cutting = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    cutting.enable_truncation(max_length=4)
    cutting.enable_padding(length=8)
    cutting.save(str(tmp_path / "cutting.json"))
    texts = ["a b c d e f g h i j k l", "a"]
    expected = documents(load(tokenizer_json), texts)
    assert documents(load(tmp_path / "cutting.json"), texts) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name):
    (tmp_path / name).write_text('{"weights": {}}')
    with pytest.raises(UserError, match=f"{name} is not a "):
        load_tokenizer(tmp_path / name, EOD)


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("", None), ("0", None), ("x", None)])
def test_a_worker_encodes_on_its_share_of_the_cores(
    sentencepiece_model, monkeypatch, told, threads
):
    asked = []
    encode = sentencepiece.SentencePieceProcessor.encode

    def spy(model, *arguments, **options):
        asked.append(options["num_threads"])
        return encode(model, *arguments, **options)

    tokenizer = load_tokenizer(sentencepiece_model, EOD)
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "encode", spy)
    monkeypatch.setenv("RAYON_NUM_THREADS", told)
    tokenizer.encode_documents(["a b", "c"])
    assert set(asked) == {threads or len(os.sched_getaffinity(0))}
