"""Sampling documents from raw text at a cost that does not depend on the size of the text."""

from __future__ import annotations

import functools
import gzip
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_chameleon.corpus import sample as sample_module
from megatron_chameleon.corpus.sample import sample_documents
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import source_options

PLACES, PLACE_BYTES = 10, 1 << 10
EVERYTHING = 10**6


@pytest.fixture(autouse=True)
def small_places(monkeypatch):
    monkeypatch.setattr(sample_module, "_FINE", (PLACES, PLACE_BYTES))
    monkeypatch.setattr(sample_module, "_COARSE", (PLACES, PLACE_BYTES))


def sample(path, num_documents=EVERYTHING, characters=0, seed=0, name="web", **options):
    source = source_options(path, **options)
    sources = find_sources(source)
    return sample_documents(source, sources, name, num_documents, characters, seed)


@functools.cache
def numbered(count):
    """Documents of very different lengths, which begin with their numbers."""
    rng = random.Random(0)
    return [f"{n} {rng.randbytes(int(4 ** rng.uniform(0, 5))).hex()}" for n in range(count)]


def numbers_in(found):
    return [int(text.split()[0]) for text in found.texts]


def test_every_document_of_plain_lines_has_the_same_probability(jsonl):
    count, draws = 300, 400
    path = jsonl("a.jsonl", numbered(count))
    found = Counter(n for seed in range(draws) for n in numbers_in(sample(path, seed=seed)))
    probability = PLACES * PLACE_BYTES / (path.stat().st_size + PLACE_BYTES)
    assert probability < 0.2
    deviation = np.sqrt(draws * probability * (1 - probability))
    counts = np.array([found[number] for number in range(count)])
    assert (np.abs(counts - draws * probability) < 5 * deviation).all()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_the_bytes_read_do_not_depend_on_the_size(jsonl, tmp_path, suffix):
    read = []
    for times in (1, 8):
        texts = numbered(1000 * times)
        lines = jsonl("a.jsonl", texts)
        path = tmp_path / f"a{times}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="none")
        else:
            compress: dict[str, Callable[[bytes], bytes]] = {
                "jsonl": bytes,
                "jsonl.gz": gzip.compress,
                "jsonl.zst": zstandard.ZstdCompressor().compress,
            }
            path.write_bytes(compress[suffix](lines.read_bytes()))
        found = sample(path, num_documents=PLACES)
        assert len(found.texts) <= PLACES
        assert set(found.texts) <= set(texts)
        assert found.bytes_total == path.stat().st_size
        read.append(found.bytes_read)
    assert path.stat().st_size > 1_000_000
    # The blocks in which compressed files are read have up to 256 KiB.
    assert read[1] < 2 * read[0] + (1 << 18)
    assert sample(path, num_documents=PLACES).texts == found.texts
    assert sample(path, num_documents=PLACES, seed=1).texts != found.texts
    assert sample(path, num_documents=PLACES, name="code").texts != found.texts


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_the_amount_of_text_does_not_depend_on_the_format(jsonl, tmp_path, suffix):
    rng = random.Random(1)
    texts = ["é" + rng.randbytes(rng.randrange(200)).hex() + 200 * "a" for _ in range(20_000)]
    lines = jsonl("a.jsonl", [{"text": text, "url": 20 * "b"} for text in texts])
    path = tmp_path / f"b.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=5000)
    else:
        content = lines.read_bytes()
        packed = {"gz": gzip.compress(content), "zst": zstandard.compress(content)}
        path.write_bytes(packed.get(suffix[6:], content))
    expected = sum(len(text.encode()) for text in texts)
    found = sample(path, num_documents=PLACES, characters=1)
    assert found.bytes_read < path.stat().st_size
    assert found.text_bytes == pytest.approx(expected, rel=0.1)
    assert sample(path, characters=10 * expected).text_bytes == expected


def test_the_sample_covers_all_files_and_row_groups(tmp_path, jsonl):
    texts, folder = numbered(1500), tmp_path / "text"
    folder.mkdir()
    for part in range(3):
        pq.write_table(
            pa.table({"text": texts[part * 500 : part * 500 + 500]}),
            folder / f"{part}.parquet",
            row_group_size=20,
            compression="none",
        )
    found = {number for seed in range(60) for number in numbers_in(sample(folder, seed=seed))}
    groups = {number // 20 for number in found}
    assert len(groups) > 0.9 * 1500 / 20
    thirds = Counter(number // 500 for number in numbers_in(sample(folder)))
    assert min(thirds.values()) > 0


def test_small_text_is_read_completely(jsonl):
    texts = numbered(8)
    path = jsonl("a.jsonl", [*texts[:4], "", {"text": None}, *texts[4:]])
    found = sample(path, characters=2 * path.stat().st_size)
    assert found.texts == texts
    assert (found.documents_read, found.bytes_read) == (10, path.stat().st_size)
    some = sample(path, num_documents=3)
    assert len(some.texts) == 3
    assert some.texts == [text for text in texts if text in some.texts]


@pytest.mark.parametrize("num_documents", [1, 20])
@pytest.mark.parametrize("characters", [0, 300, 2000])
def test_a_sample_has_the_least_documents_with_the_requested_number_and_length(
    jsonl, num_documents, characters
):
    texts = [f"{n} " + n % 7 * 50 * "a" for n in range(40)]
    found = sample(jsonl("a.jsonl", texts), num_documents, characters).texts
    lengths = [len(text) for text in found]
    assert len(found) >= num_documents
    assert sum(lengths) >= characters
    if len(found) > num_documents:  # without the last one that was added, there are too few
        assert sum(lengths) - max(lengths) < characters
    some = {*sample(jsonl("a.jsonl", texts), num_documents).texts}
    assert some <= {*found}  # longer samples of a seed extend shorter ones


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([{"content": "a"}] * 3000, {}, "no key 'text', only content"),
        (["", {"text": None}], {}, "'web' has no text"),
        ([b"{"] * 3000, {}, "malformed"),
    ],
)
def test_text_that_cannot_be_sampled_is_an_error(jsonl, items, options, message):
    with pytest.raises(UserError, match=message):
        sample(jsonl("a.jsonl", items), **options)


def test_object_storage_gives_the_sample_of_local_files(jsonl, tmp_path, object_store):
    jsonl("text/a.jsonl", numbered(300))
    pq.write_table(pa.table({"text": numbered(300)}), tmp_path / "text/b.parquet", row_group_size=9)
    url = object_store.put(tmp_path / "text", "text")
    local, remote = sample(tmp_path / "text"), sample(url)
    assert remote.texts == local.texts
    assert len(remote.texts) < 300
    assert remote.bytes_read == local.bytes_read < remote.bytes_total
