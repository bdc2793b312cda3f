from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.corpus import shards as shard_module
from megatron_chameleon.corpus.records import MalformedRecord
from megatron_chameleon.corpus.shards import (
    COPIES_NAME,
    DIGEST,
    DIGESTS_NAME,
    DOCUMENT,
    DOCUMENTS_NAME,
    TOKENS_NAME,
    Shard,
    ShardWriter,
    sorted_digests,
)
from megatron_chameleon.errors import UserError

# Few values of each, so that all kinds of equality come up.
KEYS = ("high", "low", "domain", "split", "given")
some_texts = st.lists(
    st.tuples(*(st.integers(0, high) for high in (2, 1, 1, 2, 1))), min_size=1, max_size=40
)


@given(some_texts)
def test_the_first_of_the_documents_with_one_text_domain_and_split_stays(texts):
    records = np.zeros(len(texts), DIGEST)
    records["document"] = np.arange(len(texts))
    for name, values in zip(KEYS, zip(*texts, strict=True), strict=True):
        records[name] = values
    unique, copies = sorted_digests(records)

    first: dict[tuple[int, ...], int] = {}
    for number, text in enumerate(texts):
        first.setdefault(text, number)
    assert [record[list(KEYS)].tolist() for record in unique] == sorted(first)
    assert unique["document"].tolist() == [number for _, number in sorted(first.items())]
    found = {int(copy["document"]): (int(copy["first"]), int(copy["domain"])) for copy in copies}
    assert found == {
        number: (first[text], text[2]) for number, text in enumerate(texts) if first[text] != number
    }


def written(folder, count, rng, run=None):
    folder.mkdir()
    writer = ShardWriter(folder, "uint16")
    tokens, lengths = [], []
    for begin in range(0, count, 7):
        size = min(7, count - begin)
        documents = np.zeros(size, DOCUMENT)
        documents["tokens"] = rng.integers(1, 30, size)
        documents["split"] = rng.integers(0, 3, size)
        tokens.append(rng.integers(0, 60_000, int(documents["tokens"].sum())))
        lengths += documents["tokens"].tolist()
        writer.add(tokens[-1], documents, rng.integers(0, 2**63, (size, 2)).astype(np.uint64))
    writer.finish()
    no_lines = MalformedRecord(0, 0, [], [], [])
    shard = Shard(folder, "0" * 64, "uint16", ["a"], [0], writer.documents, writer.tokens,
                  writer.runs, writer.copies, [], writer.checksums, no_lines, 0.0)  # fmt: skip
    shard.save()
    return Shard.load(folder), np.concatenate(tokens), lengths


def test_what_is_added_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "_RUN_DOCUMENTS", 20)
    shard, tokens, lengths = written(tmp_path / "shard", 100, np.random.default_rng(1))
    shard.check_files()
    np.testing.assert_array_equal(np.fromfile(shard.root / TOKENS_NAME, np.uint16), tokens)
    blocks = list(shard.document_blocks(33))
    assert [block.size for block in blocks] == [33, 33, 33, 1]
    assert np.concatenate(blocks)["tokens"].tolist() == lengths
    assert (shard.documents, shard.tokens) == (100, tokens.size)
    assert shard.runs == [21, 21, 21, 21, 16]
    digests = np.fromfile(shard.root / DIGESTS_NAME, DIGEST)
    for run in np.split(digests, np.cumsum(shard.runs)[:-1]):
        assert (np.diff(run["high"].astype(object)) > 0).all()
    assert sorted(digests["document"].tolist()) == list(range(100))


@pytest.mark.parametrize("name", [TOKENS_NAME, DOCUMENTS_NAME, DIGESTS_NAME, COPIES_NAME])
def test_a_damaged_file_is_refused(tmp_path, name):
    shard, _, _ = written(tmp_path / "shard", 30, np.random.default_rng(2))
    shard.check_files()
    path = shard.root / name
    content = path.read_bytes()
    damaged = bytes([*content[:-1], content[-1] ^ 1]) if content else b"x"
    for wrong in (content + b"x", damaged):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{name} does not match .*remove {shard.root} and"):
            shard.check_files()
    path.unlink()
    with pytest.raises(UserError, match=rf"{name} does not match"):
        shard.check_files()


@pytest.mark.parametrize("name", [TOKENS_NAME, DOCUMENTS_NAME, DIGESTS_NAME])
def test_a_full_disk_is_told_in_one_line(tmp_path, name):
    os.symlink("/dev/full", tmp_path / name)
    writer = ShardWriter(tmp_path, "uint16")

    def write():
        writer.add(np.arange(5), np.zeros(5, DOCUMENT), np.zeros((5, 2), np.uint64))
        writer.finish()

    with pytest.raises(UserError, match=rf"cannot write .*{name}: No space left on device"):
        write()
