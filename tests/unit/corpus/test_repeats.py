"""Repeated documents, compared with a plain count over sets of 5-grams."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Repeats
from megatron_chameleon.corpus import repeats
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.indexed import in_memory
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.corpus.repeats import count_repeats, shingles
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import make_corpus


def file_of(documents):
    tokens = np.concatenate([np.array(d, np.uint16) for d in documents])
    return in_memory(Path("x"), tokens, np.array([len(d) for d in documents], np.int32))


def similarity(first, second):
    """Jaccard similarity of the sets of 5-grams."""
    a, b = ({tuple(d[i : i + 5]) for i in range(max(1, len(d) - 4))} for d in (first, second))
    return len(a & b) / len(a | b)


@pytest.fixture
def documents():
    """Documents of 0 to 200 tokens, then changed copies: every n-th token differs."""
    generator = np.random.default_rng(0)
    lengths = [0, 1, 3, 3, 5, *generator.integers(60, 200, 80).tolist()]
    found = [generator.integers(0, 2000, length).tolist() for length in lengths]
    for number in range(5, 65):
        copy = list(found[number])
        distance = (4, 8, 400)[number % 3]  # no 5-gram, few or almost all are in common
        copy[::distance] = [token + 2000 for token in copy[::distance]]
        found.append(copy)
    return [*found, *found[5:12], [], found[2]]


def test_exact_and_near_repeats_are_those_of_a_plain_count(documents, tmp_path, monkeypatch):
    pytest.importorskip("rensa")
    monkeypatch.setattr(repeats, "_BLOCK_TOKENS", 300)
    seen = set()
    exact: list[int] = []
    near: list[int] = []
    unlike: list[int] = []
    for number, document in enumerate(documents):
        best = max((similarity(document, d) for d in documents[:number] if d), default=0)
        kind = exact if tuple(document) in seen else near if best > 0.9 else unlike
        kind.append(len(document))
        seen.add(tuple(document))
        assert best > 0.9 or best < 0.4 or not document  # far from where MinHash is uncertain
    total = sum(map(len, documents))
    expected = Repeats(len(documents), total, len(exact), sum(exact), len(near), sum(near))
    assert len(exact) == 9
    assert len(near) > 15
    files = [file_of(documents[:50]), file_of(documents[50:])]
    assert count_repeats(files, True, tmp_path) == expected
    plain = replace(expected, near_documents=None, near_tokens=None)
    assert count_repeats(files, False, tmp_path) == plain
    assert count_repeats([], True, tmp_path) == Repeats(0, 0, 0, 0, 0, 0)
    assert not list(tmp_path.iterdir())


def test_shingles_are_the_same_wherever_a_document_is(documents):
    tokens = np.concatenate([np.array(d, np.int64) for d in documents])
    hashes, offsets = shingles(tokens, np.array([len(d) for d in documents]))
    distinct: dict[tuple[int, ...], int] = {}
    for document, start, stop in zip(documents, offsets[:-1], offsets[1:], strict=True):
        grams = [tuple(document[i : i + 5]) for i in range(max(1, len(document) - 4))]
        found = hashes[int(start) : int(stop)].tolist()
        assert len(found) == (len(grams) if document else 0)
        for gram, value in zip(grams, found, strict=False):
            assert distinct.setdefault(gram, value) == value
    assert len(set(distinct.values())) == len(distinct)


@pytest.mark.parametrize("drop", [True, False])
def test_a_corpus_records_its_repeats(
    jsonl, texts, preprocessing, tokenizer_json, tmp_path, drop, capsys
):
    pytest.importorskip("rensa")
    some = texts(200, words=60)
    lines = [*some, *(text + " again" for text in some if len(text) > 200), *some[:20]]
    inputs = f"a={jsonl('a.jsonl', lines)}", f"b={jsonl('b.jsonl', texts(200, 2))}"
    options = preprocessing(*inputs, find_repeats="near", drop_duplicates=drop)
    corpus = make_corpus(options)
    found = corpus.repeats["a"]
    assert found.documents == len(lines)
    assert found.exact_documents == 20
    assert 0 < found.exact_tokens < found.tokens
    assert found.near_documents == pytest.approx(len(lines) - 220, abs=5)
    assert corpus.repeats["b"].kinds() == [("exact", 0, 0), ("near", 0, 0)]
    exact = make_corpus(replace(options, output=tmp_path / "exact", find_repeats="exact"))
    assert exact.repeats["a"] == replace(found, near_documents=None, near_tokens=None)
    assert "near" in capsys.readouterr().out

    prefixes = f"a={corpus.prefix('a', 'train')} b={corpus.prefix('b', 'train')}"
    imported = ImportOptions(
        tmp_path / "imported", tokenizer_json, prefixes, split="8,1,1", find_repeats="exact"
    )
    import_corpus(imported)
    of_train = Corpus.load(imported.output).repeats["a"]
    assert of_train.documents == corpus.domains["a"].train.documents
    assert (of_train.exact_documents == 0) == drop
    assert shlex.quote(str(imported.output)) in capsys.readouterr().out
    assert "repeats" in json.loads((imported.output / "corpus.json").read_text())


def test_near_repeats_without_minhash_are_an_error(monkeypatch, preprocessing, jsonl):
    monkeypatch.setitem(sys.modules, "rensa", None)
    options = preprocessing(f"a={jsonl('a.jsonl', ['x'])}", find_repeats="near")
    with pytest.raises(UserError, match="rensa"):
        make_corpus(options)
    assert not options.output.exists()
