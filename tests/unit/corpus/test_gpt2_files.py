from __future__ import annotations

import json

import pytest

from megatron_chameleon.corpus.tokenizer import load_tokenizer, tokenizer_json_of, vocab_file_in
from megatron_chameleon.errors import UserError
from tests.unit.corpus.tokenizer_samples import write_gpt2_files

EOD = "<|endoftext|>"


@pytest.fixture
def vocab_file(tokenizer_json, tmp_path):
    return write_gpt2_files(tokenizer_json, tmp_path)


def change_vocab(path, change):
    vocab = json.loads(path.read_text())
    change(vocab)
    path.write_text(json.dumps(vocab))


def test_the_merges_lie_beside_the_entries_under_a_name_of_their_kind(
    vocab_file, tokenizer_json, tmp_path
):
    """As transformers, Megatron-LM and the first release call them."""
    with_prefix = write_gpt2_files(tokenizer_json, tmp_path, "gpt2-")
    assert tokenizer_json_of(with_prefix) == tokenizer_json_of(vocab_file)
    first_release = vocab_file.rename(tmp_path / "encoder.json")
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    assert tokenizer_json_of(first_release) == tokenizer_json_of(with_prefix)
    assert vocab_file_in(tmp_path) == first_release
    (tmp_path / "vocab.bpe").unlink()
    assert vocab_file_in(tmp_path) is None
    with pytest.raises(UserError, match=r"vocab\.bpe is missing; .*encoder\.json needs its merges"):
        tokenizer_json_of(first_release)


def test_the_order_in_the_file_does_not_matter(vocab_file):
    expected = tokenizer_json_of(vocab_file)
    vocab = json.loads(vocab_file.read_text())
    vocab_file.write_text(json.dumps(dict(reversed(vocab.items()))))
    assert tokenizer_json_of(vocab_file) == expected


def test_entries_that_no_merge_makes_are_special_tokens(vocab_file):
    change_vocab(vocab_file, lambda vocab: vocab.update({"<pad>": len(vocab)}))
    encoder = load_tokenizer(vocab_file, EOD).encoder
    assert encoder.special_tokens() == [EOD, "<pad>"]
    ids = encoder.encode_batch([f"<pad> {EOD}"])[0]
    assert encoder.token_id(EOD) not in ids
    assert encoder.token_id("<pad>") not in ids


def test_a_merge_may_begin_with_the_sign_of_the_first_line(vocab_file):
    change_vocab(vocab_file, lambda vocab: vocab.update({"##": len(vocab)}))
    merges = vocab_file.with_name("merges.txt")
    merges.write_text(merges.read_text() + "# #\n")
    tokenizer = load_tokenizer(vocab_file, EOD)
    assert tokenizer.encoder.encode_batch(["##"])[0].tolist() == [tokenizer.vocab_size - 1]


def test_files_that_make_no_byte_level_bpe_are_refused(vocab_file):
    merges = vocab_file.with_name("merges.txt")
    lines = merges.read_text().split("\n")
    for wrong in ("a b c", "zzz a", "a"):
        merges.write_text("\n".join([lines[0], wrong, *lines[1:]]))
        with pytest.raises(UserError, match=r"merges\.txt:2 is not a merge of two entries of .*vo"):
            load_tokenizer(vocab_file, EOD)
    merges.write_bytes(b"a \xff")
    with pytest.raises(UserError, match=r"merges\.txt is not UTF-8"):
        load_tokenizer(vocab_file, EOD)
    change_vocab(vocab_file, lambda vocab: vocab.pop("Ġ"))
    with pytest.raises(UserError, match=r"no entry for 1 of the 256 bytes .'Ġ' for one"):
        load_tokenizer(vocab_file, EOD)
    for content, problem in (("{", "is not JSON"), ('{"a": "b"}', "does not map tokens to ids")):
        vocab_file.write_text(content)
        with pytest.raises(UserError, match=problem):
            load_tokenizer(vocab_file, EOD)
