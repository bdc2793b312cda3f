from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus, NotWritten
from megatron_chameleon.artifacts.corpus import file_name_of, index_file_bytes
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import corpus_in


@pytest.fixture
def corpus(tmp_path):
    corpus = corpus_in(tmp_path / "corpus")
    corpus.save()
    return corpus


def file_of(corpus, name, split, suffix):
    return Path(f"{corpus.prefix(name, split)}{suffix}")


def test_the_folder_or_its_file_can_be_named(corpus):
    assert Corpus.load(corpus.root) == Corpus.load(corpus.root / "corpus.json") == corpus


def test_what_was_not_written_is_kept_and_need_not_be_told(corpus):
    counted = {"a": NotWritten(duplicates=1, held_out=2, empty=3, malformed=4)}
    dataclasses.replace(corpus, not_written=counted).save()
    assert Corpus.load(corpus.root).not_written == counted
    path = corpus.root / "corpus.json"
    record = json.loads(path.read_text())
    del record["not_written"], record["checksum"]
    path.write_text(json.dumps(record))
    assert Corpus.load(corpus.root).not_written == {}


def test_a_corpus_without_domains_is_refused(corpus):
    dataclasses.replace(corpus, domains={}).save()
    with pytest.raises(UserError, match=r"corpus\.json: field domains"):
        Corpus.load(corpus.root)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_missing_file_is_named(corpus, split, suffix):
    path = file_of(corpus, "ü/..", split, suffix)
    path.unlink()
    with pytest.raises(UserError, match=r"is missing") as refused:
        Corpus.load(corpus.root)
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named_with_both_sizes(corpus, suffix, change):
    path = file_of(corpus, "a", "valid", suffix)
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(UserError, match=f"{size + change} bytes .* records {size}: "):
        Corpus.load(corpus.root)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_the_expected_size_of_an_index_is_that_of_megatrons(tmp_path_factory, lengths):
    prefix = tmp_path_factory.mktemp("split") / "split"
    writer = IndexedWriter(prefix, "uint16")
    for length in lengths:
        writer.add(np.ones(length, dtype=np.int64))
    writer.finish()
    assert prefix.with_suffix(".idx").stat().st_size == index_file_bytes(len(lengths))


def test_verify_reads_every_byte(corpus):
    corpus.verify()
    for path in sorted(corpus.root.glob("*.bin")) + sorted(corpus.root.glob("*.idx")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        Corpus.load(corpus.root)  # sizes alone do not tell
        with pytest.raises(UserError, match=r"has changed since it was written") as no:
            corpus.verify()
        assert str(no.value).startswith(str(path.with_suffix(".bin")))
        path.write_bytes(content)


def test_the_hash_is_that_of_the_contents_wherever_they_lie(corpus, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(corpus.root, moved)
    assert Corpus.load(moved).hash == corpus.hash
    assert corpus_in(tmp_path / "same").hash == corpus.hash


def test_the_hash_changes_with_tokens_names_and_tokenizer(corpus, tmp_path):
    other_tokens = corpus_in(tmp_path / "tokens", content=8)
    other_names = corpus_in(tmp_path / "names", names=("a", "b"))
    fewer = corpus_in(tmp_path / "fewer", names=("a",))
    tokenizer = dataclasses.replace(corpus.tokenizer, sha256="u" * 64)
    other_tokenizer = dataclasses.replace(corpus, tokenizer=tokenizer)
    hashes = {c.hash for c in (corpus, other_tokens, other_names, fewer, other_tokenizer)}
    assert len(hashes) == 5
    assert corpus.domain_hash("a") == other_names.domain_hash("a") != other_tokens.domain_hash("a")


NASTY = ["", ".", "..", "...", "a/b", "../x", "/etc/passwd", "a b", "a_b", "a%20b", "%", "%2E", "-",
         "ü", "日本語", "\n", "\0", "a\\b", "con", "~", "x" * 300, "é" * 80, "x" * 299]  # fmt: skip


@pytest.mark.parametrize("name", ["python_sources", "C4", "pile-cc", "wiki(en)", "v1.2", "a,b+c"])
def test_plain_domain_names_are_their_own_file_names(name):
    assert file_name_of(name) == name


@given(st.text() | st.sampled_from(NASTY))
def test_a_file_stays_in_its_folder_whatever_the_domain_is_called(name):
    file_name = file_name_of(name)
    assert file_name
    assert "/" not in file_name
    assert "\0" not in file_name
    assert not file_name.startswith(".")
    assert file_name.isascii()
    assert len(file_name) <= 255 - len(".safetensors")


@given(st.text() | st.sampled_from(NASTY), st.text() | st.sampled_from(NASTY))
@example("a b", "a_b")
@example("", "%")
@example(".a", "%2Ea")
@example("x" * 300, file_name_of("x" * 300))
def test_different_domains_have_different_files(first, second):
    assert (file_name_of(first) == file_name_of(second)) == (first == second)


def test_all_nasty_names_can_be_written_side_by_side(tmp_path):
    for name in NASTY:
        (tmp_path / f"{file_name_of(name)}.safetensors").write_text(name)
    assert len(list(tmp_path.iterdir())) == len(NASTY)
    for name in NASTY:
        read = (tmp_path / f"{file_name_of(name)}.safetensors").read_text()
        assert read == name
