from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus import indexed, join
from megatron_chameleon.corpus.join import join_shards
from megatron_chameleon.corpus.records import MalformedRecord
from megatron_chameleon.corpus.shards import DOCUMENT, Shard, ShardWriter

NUM_DOMAINS, NUM_DOCUMENTS = 40, 1000


@pytest.fixture
def shards(tmp_path):
    """Two shards of random documents, each a text of its own, of many domains in any order."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        writer = ShardWriter(tmp_path / f"{number}", "uint16")
        documents = np.zeros(NUM_DOCUMENTS, DOCUMENT)
        documents["tokens"] = rng.integers(1, 20, NUM_DOCUMENTS)
        documents["domain"] = rng.integers(0, NUM_DOMAINS, NUM_DOCUMENTS)
        documents["split"] = rng.integers(0, 3, NUM_DOCUMENTS)
        documents["text_bytes"] = rng.integers(1, 100, NUM_DOCUMENTS)
        tokens = rng.integers(0, 60_000, int(documents["tokens"].sum()))
        writer.add(tokens, documents, rng.integers(0, 2**63, (NUM_DOCUMENTS, 2)).astype(np.uint64))
        writer.finish()
        names = [f"{name}" for name in rng.permutation(NUM_DOMAINS)]
        counts = (writer.documents, writer.tokens, writer.runs, writer.copies)
        no_lines = MalformedRecord(0, 0, [], [], [])
        root = tmp_path / f"{number}"
        empty = [number + 1] * NUM_DOMAINS
        made.append(Shard(root, "", "uint16", names, empty, *counts, [], {}, no_lines, 0.0))
    (tmp_path / "joined").mkdir()
    return made


def expected_of(shards, name, split):
    """Tokens and lengths of one split of a domain, one document after another."""
    tokens, lengths, text_bytes = [], [], 0
    for shard in shards:
        (documents,) = shard.document_blocks(NUM_DOCUMENTS)
        ends = np.cumsum(documents["tokens"])
        all_tokens = np.fromfile(shard.root / "tokens.bin", np.uint16)
        for document, end in zip(documents, ends, strict=True):
            if shard.domains[document["domain"]] == name and SPLITS[document["split"]] == split:
                tokens.append(all_tokens[end - document["tokens"] : end])
                lengths.append(int(document["tokens"]))
                text_bytes += int(document["text_bytes"])
    return np.concatenate(tokens), lengths, text_bytes


def test_documents_go_to_their_domain_and_split_in_the_order_of_the_shards(shards, tmp_path):
    told: list[int] = []
    joined = join_shards(shards, ["first", "0"], tmp_path / "joined", True, told.append)
    assert list(joined.domains)[:2] == ["first", "0"]
    assert list(joined.domains)[2:] == [name for name in shards[0].domains if name != "0"]
    for name in shards[0].domains:
        assert joined.not_written[name].empty == 3
        for split in SPLITS:
            part = joined.domains[name].split(split)
            tokens, lengths, text_bytes = expected_of(shards, name, split)
            path = tmp_path / "joined" / f"{part.prefix}.bin"
            np.testing.assert_array_equal(np.fromfile(path, np.uint16), tokens)
            found = np.fromfile(path.with_suffix(".idx"), np.int32, len(lengths), offset=34)
            assert found.tolist() == lengths
            assert (part.documents, part.tokens) == (len(lengths), sum(lengths))
            assert part.text_bytes == text_bytes
    assert [joined.domains["first"].split(split).documents for split in SPLITS] == [0, 0, 0]
    assert sum(told) == 2 * sum(shard.tokens for shard in shards)
    assert {path.name for path in (tmp_path / "joined").iterdir()} == {"tokens"}


def test_what_waits_for_the_disk_is_bounded_over_all_domains(shards, tmp_path, monkeypatch):
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
    join_shards(shards, [], tmp_path / "joined", True, look)
    assert len(writers) == NUM_DOMAINS * len(SPLITS)
    assert 1000 < max(waiting) < 2000 * 1.5
