"""Write shards, join shards without duplicates and held-out text, and move documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus import join, shards
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.corpus.join import (
    DUPLICATE,
    HELD_OUT,
    KEPT,
    CorpusWriter,
    document_bytes,
    find_left_out,
    read_reasons,
    reasons_to_leave_out,
    token_bytes,
)
from megatron_chameleon.corpus.readers import MalformedLines
from megatron_chameleon.corpus.shards import (
    DOCUMENT,
    Shard,
    ShardWriter,
    assign_splits,
    text_digest,
)
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.corpus.corpus_making import regrouped


def write_shard(folder, blocks, domains):
    """Write a shard of ``blocks`` (tokens, DOCUMENT records and digests), and load it."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, "uint16")
    for block in blocks:
        writer.add(*block)
    counts: dict[str, Any] = {"checksums": writer.finish()}
    counts |= {name: getattr(writer, name) for name in ("documents", "tokens", "runs", "copies")}
    counts |= {"domains": list(domains), "malformed": MalformedLines()}
    Shard(folder, "0" * 64, dtype="uint16", hashes=[], seconds=0.0, **counts).save()
    return Shard.load(folder)


# Splits


def split_all(digests, shares):
    heads = np.frombuffer(b"".join(digest[:8] for digest in digests), ">u8").astype(np.uint64)
    return [SPLITS[number] for number in assign_splits(heads, shares)]


def test_the_splits_follow_the_shares_and_never_change():
    """The split of a text must be the same in corpora of all releases."""
    shares = (0.8, 0.15, 0.05)
    splits = split_all([text_digest(f"text {i}".encode()) for i in range(20_000)], shares)
    for name, share in zip(SPLITS, shares, strict=True):
        assert splits.count(name) / 20_000 == pytest.approx(share, abs=0.01)
    assert text_digest(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"
    digests = [text_digest(text) for text in (b"abc", b"d", b"e", b"h", b"m")]
    assert split_all(digests, (0.34, 0.33, 0.33)) == ["test", "train", "valid", "test", "train"]


# Duplicates and held-out text. A row holds both halves of the digest, domain, split and by_source.


def reasons_reference(rows):
    """Plain reference: row by row, find why a document is kept or excluded."""
    of_each_text: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for high, low, _, split, by_source in rows:
        of_each_text.setdefault((high, low), []).append((split, by_source))
    reasons, seen = [], set()
    for high, low, domain, split, _ in rows:
        splits = of_each_text[high, low]
        own = [split for split, by_source in splits if by_source and split > 0]
        if split != max(own or [split for split, _ in splits]):
            reasons.append(HELD_OUT)
        else:
            reasons.append(DUPLICATE if (high, low, domain) in seen else KEPT)
            seen.add((high, low, domain))
    return reasons


def shards_of(folder, rows_of_each):
    """Write shards whose domains are numbered in order of first occurrence."""
    found, numbers = [], []
    for number, rows in enumerate(rows_of_each):
        own, blocks = list(dict.fromkeys(row[2] for row in rows)), []
        for begin in range(0, len(rows), 3):
            some = rows[begin : begin + 3]
            documents = np.zeros(len(some), DOCUMENT)
            documents["tokens"] = 1
            documents["domain"] = [own.index(row[2]) for row in some]
            documents["split"] = [row[3] for row in some]
            documents["by_source"] = [row[4] for row in some]
            digests = np.array([row[:2] for row in some], np.uint64)
            blocks.append((np.zeros(len(some), np.uint16), documents, digests))
        found.append(write_shard(folder / f"{number}", blocks, map(str, own)))
        numbers.append(np.array(own, dtype=np.int64))
    return found, numbers, folder / "left-out"


# There are few distinct values, so that all combinations of equal and different fields occur.
ROWS = st.tuples(
    st.integers(0, 3).map(lambda high: high << 62),
    st.integers(0, 1).map(lambda low: low << 63),
    *(st.integers(0, high) for high in (2, 2, 1)),
)


@pytest.mark.parametrize(("run_documents", "range_texts"), [(1 << 18, 1 << 19), (3, 5)])
@settings(max_examples=20, deadline=None)
@given(rows_of_each=st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4))
def test_reasons_do_not_depend_on_shards_runs_and_ranges(
    tmp_path_factory, rows_of_each, run_documents, range_texts
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_RUN_DOCUMENTS", run_documents)
        patch.setattr(join, "_RANGE_TEXTS", range_texts)
        made = shards_of(tmp_path_factory.mktemp("shards"), rows_of_each)
        find_left_out(*made)
    rows = [row for rows in rows_of_each for row in rows]
    expected = reasons_reference(rows)
    assert read_reasons(made[-1], 0, len(rows)).tolist() == expected


def test_memory_holds_one_range_however_often_a_text_occurs(tmp_path, monkeypatch):
    often = [(7, 7, 0, 0, 0)] * 500
    high = np.random.default_rng(0).integers(0, 2**63, 100).tolist()
    once = [(2 * value, 1, 0, 0, 0) for value in high]
    sizes = []

    def counting(texts, subset_shares):
        sizes.append(texts.size)
        return reasons_to_leave_out(texts, subset_shares)

    monkeypatch.setattr(join, "_RANGE_TEXTS", 10)
    monkeypatch.setattr(join, "reasons_to_leave_out", counting)
    rows = [often[:250] + once[:50], often[250:] + once[50:]]
    made = shards_of(tmp_path, rows)
    find_left_out(*made)
    assert np.sum(read_reasons(made[-1], 0, 600) == DUPLICATE) == 499
    assert sum(sizes) == 102
    assert max(sizes) <= 20


def test_a_failed_read_of_digests_or_reasons_is_an_error(tmp_path):
    (shard,), numbers, path = shards_of(tmp_path, [[(1, 1, 0, 0, 0)] * 2])
    unreadable = Path("/proc/self/mem")  # reading its first page fails with EIO
    find_left_out([shard], numbers, path)
    for file in (path, shard.root / shards.DIGESTS_NAME):
        file.unlink()
        file.symlink_to(unreadable)
    with pytest.raises(OSError, match="Input/output"):
        read_reasons(path, 0, 2)
    with pytest.raises(OSError, match="Input/output"):
        find_left_out([shard], numbers, tmp_path / "again")


# Writing


def test_write_buffers_of_all_domains_together_are_bounded(tmp_path, monkeypatch):
    def on_bytes(num_bytes):
        waiting.append(sum(len(file._tokens) + len(file._lengths) for file in writer._writers))

    monkeypatch.setattr(join, "_WAITING_BYTES", 2000)
    (tmp_path / "tokens").mkdir()
    waiting: list[int] = []
    writer = CorpusWriter(tmp_path, [f"{i}" for i in range(40)], "uint16", on_bytes)
    files = np.random.default_rng(0).integers(0, 120, 1000)
    lengths, text_bytes = np.full(1000, 10, np.int32), np.ones(1000, np.int64)
    writer.copy(files, lengths, text_bytes, lambda start, stop: bytes(stop - start), 0)
    assert 1000 < max(waiting) < 3000
    assert (
        sum(domain.split(split).tokens for domain in writer.finish().values() for split in SPLITS)
        == 10_000
    )


# Other domains

NAMES = ["one", "t/w o", "three", "four"]


def test_regrouped_documents_keep_their_tokens_and_splits(tmp_path, monkeypatch):
    file = word_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_small_corpus(tmp_path, tokenizer_hash=sha256_of_files(file))
    divided = ("news", "poems")
    new = regrouped(corpus, divided, NAMES, tmp_path / "new")
    for split in SPLITS:
        before, after = (
            sum(some.domains[name].split(split).text_bytes or 0 for name in names)
            for some, names in ((corpus, divided), (new, NAMES))
        )
        assert before == after
    monkeypatch.setattr(join, "_BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(join, "_WAITING_BYTES", 100)
    monkeypatch.setattr(join, "_BLOCK_TOKENS", 300)
    assert regrouped(corpus, divided, NAMES, tmp_path / "again").domains == new.domains


@pytest.mark.parametrize("kind", ["tokenizer_json", "sentencepiece_model"])
def test_document_bytes_are_close_to_those_of_the_text(kind, request, texts):
    eod = {"tokenizer_json": "<|endoftext|>", "sentencepiece_model": "</s>"}[kind]
    tokenizer = load_tokenizer(request.getfixturevalue(kind), eod)
    some = [*texts(20), "def f(x):\n\treturn x + 1\n", "a", "the cat sat on the mat " * 40]
    some += ["  Zwölf Boxkämpfer jagen Viktor. ", "Привет, мир! 日本語のテキスト 🙂🙃"]
    expected = [len(text.encode()) for text in some]
    tokens, lengths = tokenizer.encode_documents(some)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
    checked = BlockTokens(Path("texts"), tokens)
    file = TokenFile(Path("texts"), checked, lengths, starts, np.arange(len(lengths) + 1))
    found = document_bytes(file, token_bytes(tokenizer), sum(expected))
    assert found.sum() == sum(expected)
    np.testing.assert_allclose(found, expected, atol=4, rtol=0.02)
