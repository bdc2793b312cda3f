from __future__ import annotations

import dataclasses
import re
import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.corpus import file_name_of
from tests.unit.artifacts.artifact_samples import corpus_in


@pytest.fixture
def corpus(tmp_path):
    corpus = corpus_in(tmp_path / "corpus")
    corpus.save()
    return corpus


def test_hash_depends_only_on_tokens_names_and_tokenizer(corpus, tmp_path):
    moved = shutil.copytree(corpus.root, tmp_path / "elsewhere")
    assert Corpus.load(moved).hash == corpus.hash == corpus_in(tmp_path / "same").hash
    other_tokens = corpus_in(tmp_path / "tokens", content=8)
    other_names = corpus_in(tmp_path / "names", names=("a", "b"))
    fewer = corpus_in(tmp_path / "fewer", names=("a",))
    tokenizer = dataclasses.replace(corpus.tokenizer, sha256="u" * 64)
    other_tokenizer = dataclasses.replace(corpus, tokenizer=tokenizer)
    hashes = {c.hash for c in (corpus, other_tokens, other_names, fewer, other_tokenizer)}
    assert len(hashes) == 5
    assert corpus.domain_hash("a") == other_names.domain_hash("a") != other_tokens.domain_hash("a")


def test_hash_depends_on_the_held_out_domains_only_if_there_are_any(corpus, tmp_path):
    name, *others = corpus.names
    domain = corpus.domains[name]
    train = dataclasses.replace(domain.train, documents=0, tokens=0)
    held_out = {name: dataclasses.replace(domain, train=train)}
    found = dataclasses.replace(
        corpus, domains={n: corpus.domains[n] for n in others}, held_out=held_out
    )
    assert found.hash != dataclasses.replace(found, held_out={}).hash
    assert (found.names, list(found.all_domains)) == (others, [*others, name])
    assert found.prefix(name, "test") == corpus.prefix(name, "test")
    for wrong in ({name: domain}, {others[0]: held_out[name]}):
        with pytest.raises(ValueError, match="held_out"):
            dataclasses.replace(found, held_out=wrong)


HOSTILE = ["", ".", "..", "a/b", "../x", "a b", "a_b", "a%20b", "%", "%2E", "ü", "\n", "\0", "~"]
HOSTILE += ["日本語", "a\\b", "x" * 300, "é" * 80, "x" * 299]


@given(st.text() | st.sampled_from(HOSTILE))
def test_file_names_are_valid_for_any_domain(name):
    found = file_name_of(name)
    assert re.fullmatch(r"[!-.0-~][!-.0-~]{0,243}", found)  # no slash, space or control character
    assert not found.startswith(".")
    assert found == name or not re.fullmatch(r"[\w()+,-]{1,200}", name, re.ASCII)


@given(st.text() | st.sampled_from(HOSTILE), st.text() | st.sampled_from(HOSTILE))
@example("a b", "a_b")
@example("", "%")
@example(".a", "%2Ea")
@example("x" * 300, file_name_of("x" * 300))
def test_different_domains_have_different_files(first, second):
    assert (file_name_of(first) == file_name_of(second)) == (first == second)
