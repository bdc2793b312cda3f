"""Shards on disk, joining them without duplicates and held-out text, and moving documents."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus import indexed, join, shards
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile, open_tokens
from megatron_chameleon.corpus.join import (
    DUPLICATE,
    HELD_OUT,
    KEPT,
    TEXT,
    document_bytes,
    find_left_out,
    join_shards,
    reasons_to_leave_out,
    regroup,
    token_bytes,
)
from megatron_chameleon.corpus.readers import MalformedLines
from megatron_chameleon.corpus.shards import (
    DOCUMENT,
    DOCUMENTS_NAME,
    Shard,
    ShardWriter,
    splits_of,
    text_digest,
)
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer, load_tokenizer
from tests.small_corpus import word_tokenizer, write_small_corpus

TRAIN, VALID, TEST = range(3)
# High half, low half, domain, split, by_source; few values, so that all kinds of equality occur.
few_values = st.tuples(*(st.integers(0, high) for high in (3, 1, 2, 2, 1)))


def finished(folder, writer, domains, empty=()):
    """The shard that ``writer`` has written to ``folder``, saved and loaded."""
    checksums = writer.finish()
    shard = Shard(
        root=folder,
        plan="0" * 64,
        dtype="uint16",
        domains=list(domains),
        empty=list(empty),
        documents=writer.documents,
        tokens=writer.tokens,
        runs=writer.runs,
        copies=writer.copies,
        hashes=[],
        checksums=checksums,
        malformed=MalformedLines(),
        seconds=0.0,
    )
    shard.save()
    return Shard.load(folder)


# Splits


def split_of(digest, shares):
    """The split of one text, one end of the interval after another."""
    position = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
    ends = zip(SPLITS, accumulate(shares), strict=True)
    return next((name for name, end in ends if position < end), SPLITS[-1])


def split_all(digests, shares):
    heads = np.frombuffer(b"".join(digest[:8] for digest in digests), ">u8").astype(np.uint64)
    return [SPLITS[number] for number in splits_of(heads, shares)]


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=20),
    st.sampled_from([(1 / 3, 1 / 3, 1 / 3), (0.25, 0.25, 0.5), (0.9, 0.05, 0.05)]),
)
def test_splits_match_the_reference(digests, shares):
    digests += [b"\x00" * 16, b"\xff" * 16, b"\x80" + b"\x00" * 15, b"\x7f" + b"\xff" * 15]
    assert split_all(digests, shares) == [split_of(digest, shares) for digest in digests]


def test_the_splits_follow_the_shares_and_never_change():
    """Corpora of earlier releases must not share a document across splits with new ones."""
    shares = (0.8, 0.15, 0.05)
    splits = split_all([text_digest(f"text {i}".encode()) for i in range(20_000)], shares)
    for name, share in zip(SPLITS, shares, strict=True):
        assert splits.count(name) / 20_000 == pytest.approx(share, abs=0.01)
    assert text_digest(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"
    digests = [text_digest(text) for text in (b"abc", b"d", b"e", b"h", b"m")]
    assert split_all(digests, (0.34, 0.33, 0.33)) == ["test", "train", "valid", "test", "train"]


# Duplicates and held-out text


def texts_of(rows):
    rows = [(*row, 0)[:5] for row in rows]
    high, low, domain, split, by_source = zip(*rows, strict=True) if rows else ([],) * 5
    columns = (high, low, range(len(rows)), domain, split, by_source)
    return np.array(list(zip(*columns, strict=True)), TEXT)


def reasons_reference(texts):
    """The reasons, one text after another."""
    of_each_text: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for high, low, split, is_given in zip(
        *(texts[name] for name in ("high", "low", "split", "by_source")), strict=True
    ):
        of_each_text.setdefault((high, low), []).append((split, is_given))
    reasons = [KEPT] * texts.size
    seen = set()
    for i in np.argsort(texts["order"]):
        text = (texts["high"][i], texts["low"][i])
        given_splits = [split for split, is_given in of_each_text[text] if is_given and split > 0]
        if texts["split"][i] != max(given_splits or [split for split, _ in of_each_text[text]]):
            reasons[i] = HELD_OUT
        elif (text, texts["domain"][i]) in seen:
            reasons[i] = DUPLICATE
        else:
            seen.add((text, texts["domain"][i]))
    return reasons


def shards_of(folder, rows_of_each):
    """Shards whose domains are numbered in the order of their first mention."""
    found, numbers = [], []
    for number, rows in enumerate(rows_of_each):
        root = folder / f"{number}"
        root.mkdir(parents=True)
        writer = ShardWriter(root, "uint16")
        own = list(dict.fromkeys(row[2] for row in rows))
        for begin in range(0, len(rows), 3):
            some = rows[begin : begin + 3]
            documents = np.zeros(len(some), DOCUMENT)
            documents["tokens"] = 1
            documents["domain"] = [own.index(row[2]) for row in some]
            documents["split"] = [row[3] for row in some]
            documents["by_source"] = [row[4] if len(row) == 5 else 0 for row in some]
            digests = np.array([row[:2] for row in some], np.uint64)
            writer.add(np.zeros(len(some), np.uint16), documents, digests)
        found.append(finished(root, writer, map(str, own)))
        numbers.append(np.array(own, dtype=np.int64))
    (folder / "left-out").mkdir()
    return found, numbers, folder / "left-out"


wide = st.builds(lambda row: (row[0] << 62, row[1] << 63, *row[2:]), few_values)


@pytest.mark.parametrize(("run_documents", "range_texts"), [(1 << 18, 1 << 19), (3, 5)])
@settings(max_examples=20, deadline=None)
@given(rows_of_each=st.lists(st.lists(wide, max_size=12), min_size=1, max_size=4))
def test_reasons_do_not_depend_on_shards_runs_and_ranges(
    tmp_path_factory, rows_of_each, run_documents, range_texts
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_RUN_DOCUMENTS", run_documents)
        patch.setattr(join, "_RANGE_TEXTS", range_texts)
        left_out = find_left_out(*shards_of(tmp_path_factory.mktemp("shards"), rows_of_each))
    rows = [row for rows in rows_of_each for row in rows]
    expected = reasons_reference(texts_of(rows))
    found: list[int] = []
    for number, of_shard in enumerate(rows_of_each):
        reasons = left_out.reasons(number)
        found += [KEPT] * len(of_shard) if reasons is None else reasons.tolist()
    assert found == expected
    for counted, reason in ((left_out.duplicates, DUPLICATE), (left_out.held_out, HELD_OUT)):
        domains = [row[2] for row, why in zip(rows, expected, strict=True) if why == reason]
        assert counted == Counter(domains)


def test_memory_holds_one_range_however_often_a_text_occurs(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "_RANGE_TEXTS", 10)
    rng = np.random.default_rng(0)
    often = [(7, 7, 0, TRAIN)] * 500
    once = [(2 * int(high), 1, 0, TRAIN) for high in rng.integers(0, 2**63, 100)]
    sizes = []

    def counting(texts):
        sizes.append(texts.size)
        return reasons_to_leave_out(texts)

    monkeypatch.setattr(join, "reasons_to_leave_out", counting)
    rows = [often[:250] + once[:50], often[250:] + once[50:]]
    assert find_left_out(*shards_of(tmp_path, rows)).duplicates == {0: 499}
    assert sum(sizes) == 102
    assert max(sizes) <= 20


# Joining

NUM_DOMAINS, NUM_DOCUMENTS = 40, 1000


@pytest.fixture
def two_shards(tmp_path):
    """Two shards of random documents with distinct texts, of many domains in random order."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(2):
        root = tmp_path / f"{number}"
        root.mkdir()
        writer = ShardWriter(root, "uint16")
        documents = np.zeros(NUM_DOCUMENTS, DOCUMENT)
        documents["tokens"] = rng.integers(1, 20, NUM_DOCUMENTS)
        documents["domain"] = rng.integers(0, NUM_DOMAINS, NUM_DOCUMENTS)
        documents["split"] = rng.integers(0, 3, NUM_DOCUMENTS)
        documents["text_bytes"] = rng.integers(1, 100, NUM_DOCUMENTS)
        tokens = rng.integers(0, 60_000, int(documents["tokens"].sum()))
        writer.add(tokens, documents, rng.integers(0, 2**63, (NUM_DOCUMENTS, 2)).astype(np.uint64))
        names = [f"{name}" for name in rng.permutation(NUM_DOMAINS)]
        found.append(finished(root, writer, names, [number + 1] * NUM_DOMAINS))
    (tmp_path / "joined").mkdir()
    return found


def expected_of(shards, name, split):
    """Tokens and lengths of one split of a domain, one document after another."""
    tokens, lengths, text_bytes = [], [], 0
    for shard in shards:
        (documents,) = shard.blocks(DOCUMENTS_NAME, DOCUMENT, NUM_DOCUMENTS)
        ends = np.cumsum(documents["tokens"])
        all_tokens = np.fromfile(shard.root / "tokens.bin", np.uint16)
        for document, end in zip(documents, ends, strict=True):
            if shard.domains[document["domain"]] == name and SPLITS[document["split"]] == split:
                tokens.append(all_tokens[end - document["tokens"] : end])
                lengths.append(int(document["tokens"]))
                text_bytes += int(document["text_bytes"])
    return np.concatenate(tokens), lengths, text_bytes


def test_documents_go_to_their_domain_and_split_in_the_order_of_the_shards(two_shards, tmp_path):
    copied: list[int] = []
    joined = join_shards(two_shards, ["first", "0"], tmp_path / "joined", True, copied.append)
    assert list(joined.domains)[:2] == ["first", "0"]
    assert list(joined.domains)[2:] == [name for name in two_shards[0].domains if name != "0"]
    for name in two_shards[0].domains:
        assert joined.not_written[name].empty == 3
        for split in SPLITS:
            part = joined.domains[name].split(split)
            tokens, lengths, text_bytes = expected_of(two_shards, name, split)
            path = tmp_path / "joined" / f"{part.prefix}.bin"
            np.testing.assert_array_equal(np.fromfile(path, np.uint16), tokens)
            found = np.fromfile(path.with_suffix(".idx"), np.int32, len(lengths), offset=34)
            assert found.tolist() == lengths
            assert (part.documents, part.tokens) == (len(lengths), sum(lengths))
            assert part.text_bytes == text_bytes
    assert [joined.domains["first"].split(split).documents for split in SPLITS] == [0, 0, 0]
    assert sum(copied) == 2 * sum(shard.tokens for shard in two_shards)
    assert {path.name for path in (tmp_path / "joined").iterdir()} == {"tokens"}


def test_buffers_of_all_domains_together_are_bounded(two_shards, tmp_path, monkeypatch):
    writers = []

    class Counted(indexed.IndexedWriter):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            writers.append(self)

    waiting = []

    def look(num_bytes):
        waiting.append(sum(writer.waiting_bytes for writer in writers))

    monkeypatch.setattr(join, "IndexedWriter", Counted)
    monkeypatch.setattr(join, "_WAITING_BYTES", 2000)
    join_shards(two_shards, [], tmp_path / "joined", True, look)
    assert len(writers) == NUM_DOMAINS * len(SPLITS)
    assert 1000 < max(waiting) < 2000 * 1.5


# Other domains

NAMES = ["one", "t/w o", "three", "four"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("old")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    return write_small_corpus(root, tokenizer_hash=sha256_of_files(tokenizer))


@pytest.fixture(scope="module")
def labels(corpus):
    """Random labels for two of the three domains; no document in valid is of 'four'."""
    rng = np.random.default_rng(5)
    return {
        (name, split): rng.integers(
            0, 3 if split == "valid" else 4, corpus.domains[name].split(split).documents
        )
        for name in ("news", "poems")
        for split in SPLITS
    }


def documents_in(corpus, name, split):
    tokens = open_tokens(corpus, name, split)
    return [tokens.get(i).tolist() for i in range(len(tokens))]


def test_regrouped_documents_keep_their_tokens_and_splits(corpus, labels, tmp_path, monkeypatch):
    copied: list[int] = []
    domains = regroup(corpus, labels, NAMES, corpus_tokenizer(corpus), tmp_path, copied.append)
    corpus_tokenizer(corpus).save(tmp_path)
    dataclasses.replace(corpus, root=tmp_path, domains=domains).save()
    regrouped = Corpus.load(tmp_path)
    assert regrouped.names == ["code", *NAMES]
    regrouped.verify()
    for split in SPLITS:
        for number, new in enumerate(NAMES):
            expected = [
                document
                for name in ("news", "poems")
                for document, label in zip(
                    documents_in(corpus, name, split), labels[name, split], strict=True
                )
                if label == number
            ]
            assert documents_in(regrouped, new, split) == expected
        parts = [corpus.domains[name].split(split) for name in ("news", "poems")]
        new_parts = [regrouped.domains[name].split(split) for name in NAMES]
        assert sum(part.text_bytes for part in new_parts) == sum(p.text_bytes for p in parts)
    assert regrouped.domain_hash("code") == corpus.domain_hash("code")
    assert sum(copied) == corpus.token_bytes * sum(
        corpus.domains[name].split(split).tokens for name, split in labels
    )

    monkeypatch.setattr(join, "_BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(join, "_WAITING_BYTES", 100)
    monkeypatch.setattr(join, "_BLOCK_TOKENS", 300)
    (tmp_path / "again").mkdir()
    again = regroup(
        corpus, labels, NAMES, corpus_tokenizer(corpus), tmp_path / "again", lambda _: None
    )
    assert again == domains


TEXTS = [
    "def f(x):\n\treturn x + 1\n",
    "  Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ",
    "Привет, мир! 日本語のテキスト 🙂🙃",
    "a",
    "the cat sat on the mat " * 40,
]


def encoded(tokenizer, texts):
    tokens, lengths = tokenizer.encode_documents(texts)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1)
    checked = BlockTokens(Path("texts"), tokens)
    return TokenFile(Path("texts"), checked, lengths, starts * tokens.itemsize, boundaries)


@pytest.mark.parametrize("kind", ["tokenizer_json", "sentencepiece_model"])
def test_document_bytes_are_close_to_those_of_the_text(kind, request, texts):
    eod = {"tokenizer_json": "<|endoftext|>", "sentencepiece_model": "</s>"}[kind]
    tokenizer = load_tokenizer(request.getfixturevalue(kind), eod)
    some = [*texts(20), *TEXTS]
    expected = [len(text.encode()) for text in some]
    found = document_bytes(encoded(tokenizer, some), token_bytes(tokenizer), sum(expected))
    assert found.sum() == sum(expected)
    np.testing.assert_allclose(found, expected, atol=4, rtol=0.02)
