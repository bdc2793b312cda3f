"""Documents of JSON lines and parquet: any division gives the same, malformed lines are counted."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import readers
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import (
    Document,
    DocumentReader,
    MalformedLineError,
    MalformedLines,
    RecordParser,
    object_in,
    read_lines,
)
from megatron_chameleon.corpus.sources import Chunk, Source, find_sources
from megatron_chameleon.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}
NO_LIMIT = 1 << 40


def reader_of(path, domains=None, **options):
    source = SourceOptions(((str(path),),), **options)
    sources = find_sources(source, domains)
    return DocumentReader(source, sources, domains), sources


def read(path, domains=None, chunks=None, **options):
    reader, _ = reader_of(path, domains, **options)
    return reader, [document for chunk in chunks or [Chunk(0)] for document in reader.read(chunk)]


def texts_of(found):
    return [document.text for document in found]


def by_key(key, *renames):
    return DomainOptions(domain_key=key, rename_domain=(renames,))


# Lines


def lines_of(path, start=0, stop=None, on_block=lambda block: None, longest=NO_LIMIT):
    """The start of each line and the line, or the length of one that is too long."""
    found = []
    for begin, several in read_lines(str(path), on_block, longest, start, stop):
        for line in several:
            found.append((begin, line if isinstance(line, int) else bytes(line)))
            begin += 1 + (line if isinstance(line, int) else len(line))
    return found


def lines_reference(data):
    found, begin = [], 0
    for line in data.split(b"\n"):
        found.append((begin, line))
        begin += len(line) + 1
    return found if data and not data.endswith(b"\n") else found[:-1]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("block_size", [1, 7, 1 << 18])
def test_lines_of_plain_and_compressed_files(tmp_path, monkeypatch, suffix, block_size):
    monkeypatch.setattr(readers, "_BLOCK", block_size)
    monkeypatch.setattr(readers, "_COMPRESSED_BLOCK", block_size)
    monkeypatch.setattr(readers, "_FEWEST_BYTES", 1)
    rng = random.Random(block_size)
    data = bytes(rng.choice(b"ab\n\r ") for _ in range(2000))
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (data, b"", b"\n"):
        path.write_bytes(PACK[suffix](content[:700]) + PACK[suffix](content[700:]))
        on_disk: list[bytes] = []
        assert lines_of(path, on_block=on_disk.append) == lines_reference(content)
        assert b"".join(on_disk) == path.read_bytes()
    path.write_bytes(b"")
    assert lines_of(path) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_and_truncated_files_are_rejected(tmp_path, suffix):
    data = bytes(random.Random(0).choices(b"abc\n", k=3000))
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    whole, path = pack[suffix](data), tmp_path / f"a.jsonl{suffix}"
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="is truncated"):
            lines_of(path)
    path.write_bytes(b"this was never compressed\n" * 100)
    with pytest.raises(UserError, match="is damaged"):
        lines_of(path)
    rejected = 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            assert lines_of(path) == lines_reference(data)
        except UserError:
            rejected += 1
    assert rejected > len(whole) // 7 * 0.9


# Documents

MALFORMED = {
    b"{not json": "is not JSON",
    b'{"text": NaN}': "is not JSON",
    b'{"text": "\xff"}': "is not valid UTF-8 at byte",
    b'{"text": "\\ud800"}': "is not JSON",
    b'["text"]': "is not a JSON object but a list",
    b"null": "is not a JSON object but null",
    b'{"text": 1.5}': "has a number",
    b'{"text": true}': "has a boolean",
    b'{"text": {"a": 1}}': "has an object",
    b'{"other": "a"}': "has no key",
    b"[" * 5000: "is not JSON",
}


@pytest.mark.parametrize("line", MALFORMED)
@pytest.mark.parametrize("key", ["text", "text.text"])
def test_a_malformed_line_is_skipped_and_reported_with_its_number(jsonl, line, key):
    keyed = line.replace(b'"text":', f'"{key}":'.encode())
    path = jsonl("a.jsonl", [{key: "one"}, keyed, {key: "two"}])
    reader, found = read(path, text_key=key)
    assert texts_of(found) == ["one", "two"]
    assert (reader.malformed.lines, reader.malformed.count) == (3, 1)
    assert f"{path}:2 {MALFORMED[line]}" in reader.malformed.describe()
    reader, _ = read(path, chunks=[Chunk(0, 5, None)], text_key=key)
    assert f"{path}:byte {path.read_bytes().index(keyed)} " in reader.malformed.describe()
    reader.malformed.check(0.5)
    with pytest.raises(UserError, match="--max-malformed-share"):
        reader.malformed.check(0.49)


def test_a_missing_key_is_reported_with_the_existing_ones(jsonl, monkeypatch):
    records_ = [{"content": "one", "meta": {"id": 1}, "more": '{"deep": {"er": 2}}'}] * 3
    path = jsonl("a.jsonl", records_)
    with pytest.raises(UserError, match=r"meta\.id, more, more\.deep, more\.deep\.er; .*text-key"):
        read(path)
    monkeypatch.setattr(readers, "_LINES_BEFORE_GIVING_UP", 3)
    with pytest.raises(UserError, match="no line has the key 'text'"):
        read(jsonl("a.jsonl", [*records_, "never reached"]))


@pytest.mark.parametrize("odd_line", [[], [b"{"]])
def test_domains_are_renamed_or_left_out_and_counted(jsonl, odd_line):
    lines = [{"text": str(i), "set": name} for i, name in enumerate("ABCDAB")]
    path = jsonl("a.jsonl", [*lines, *odd_line])
    reader, found = read(path, by_key("set", "A=x", "C=x", "B="))
    assert found == [Document("x", "0"), Document("x", "2"), Document("D", "3"), Document("x", "4")]
    assert reader.malformed.unwanted == {"B": 2}
    assert reader.malformed.count == len(odd_line)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.text(st.sampled_from('añ😀 \\"\n'), max_size=12).map(
                lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
            ),
            st.sampled_from(
                [b"", b"  ", b"{", b'{"text": null}', b'{"text": "long ' + b"x" * 90 + b'"}']
            ),
        ),
        max_size=12,
    ),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    mark=st.booleans(),
    ended=st.booleans(),
    edges=st.sets(st.integers(1, 200)),
    block_size=st.integers(1, 120),
)
def test_every_division_gives_the_same_documents(lines, ending, mark, ended, edges, block_size):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        path = Path(folder, "a.jsonl")
        data = ending.join(lines) + ending * ended
        path.write_bytes(b"\xef\xbb\xbf" * mark + data)
        monkeypatch.setattr(readers, "_BLOCK", block_size)
        chunks = [Chunk(0, start, stop) for start, stop in pairwise([0, *sorted(edges), None])]
        reader, found = read(path, chunks=chunks)
        assert texts_of(found) == [
            json.loads(line)["text"] or ""
            for line in data.split(b"\n")
            if line.strip() not in (b"", b"{")
        ]
        assert reader.malformed.count == lines.count(b"{")
        assert len(reader.hashes) == len(chunks)


NAMES = st.sampled_from(["A", "B", "C", "", None, 7, "long" * 30])
SETS = st.one_of(
    st.fixed_dictionaries({"set": NAMES}),
    st.sampled_from(['{"set": "A"}', '{"set": "B"}', "{set", None, "A"]),
)
RECORDS: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"text": st.text(max_size=4)}, optional={"meta": SETS, "meta.set": NAMES}
    ),
    st.fixed_dictionaries({"meta": st.just({"set": "A"})}, optional={"text": st.none() | NAMES}),
    st.sampled_from([[], "text", 7, None]),
)


@pytest.mark.parametrize("domain", [None, "d"])
@pytest.mark.parametrize("domain_key", ["meta.set", None])
@settings(max_examples=100, deadline=None)
@given(several=st.lists(RECORDS, max_size=4))
def test_batches_of_lines_match_the_reference(several, domain, domain_key):
    options = DomainOptions(
        domain_key=domain_key, rename_domain=(("A=a", "B=") if domain_key else (),)
    )
    lines = [orjson.dumps(record) for record in several]
    counts = [MalformedLines(), MalformedLines()]
    source = Source("a", "lines", "a", domain, "train")
    reference, fast = (
        RecordParser(source, SourceOptions(()), options, count, {}) for count in counts
    )
    expected, malformed = [], 0
    for line in lines:
        try:
            expected.append(reference.parse(object_in(line)))
        except MalformedLineError:
            malformed += 1
    found = fast.parse_batch(map(orjson.loads, lines))
    if found is None:  # left to the reference
        assert malformed or any(not isinstance(record.get("text"), str) for record in several)
        return
    assert malformed == 0
    assert found == [document for document in expected if document is not None]
    assert counts[0].unwanted == counts[1].unwanted


@pytest.mark.parametrize("change", [b"shorter", b"longer" * 1000, None])
def test_a_file_that_changes_while_it_is_read_is_rejected(jsonl, change):
    path = jsonl("a.jsonl", ["word " * 100] * 5000)
    reader, _ = reader_of(path)
    documents = reader.read(Chunk(0))
    next(documents)
    path.write_bytes(change or path.read_bytes())
    with pytest.raises(UserError, match="while it was read"):
        list(documents)
    assert not reader.hashes
    if change:
        with pytest.raises(UserError, match="while it was read"):
            list(reader.read(Chunk(0)))
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        list(reader.read(Chunk(0)))


# Memory


@pytest.mark.parametrize("suffix", PACK)
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    line = b'{"text": "' + b"all the same " * 20 + b'"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](line * 80_000))
    reader, _ = reader_of(path)
    tracemalloc.start()
    assert sum(1 for _ in reader.read(Chunk(0))) == 80_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (22e6 if suffix else 8e6)


PEAK_OF_READING = """
import sys
from pathlib import Path
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources

def peak():
    # Not getrusage, which counts what the process had before it became this one.
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

for path in sys.argv[2:]:
    options = SourceOptions(((path,),), max_document_bytes=int(sys.argv[1]))
    reader = DocumentReader(options, find_sources(options))
    before = peak()
    lengths = [len(document.text) for document in reader.read(Chunk(0))]
print(sum(lengths))
print(peak() - before)
print(reader.malformed.count)
"""


def peak_of_reading(max_document_bytes, *paths):
    """Characters of the last file, memory growth while it was read, and its malformed lines."""
    command = [sys.executable, "-c", PEAK_OF_READING, str(max_document_bytes), *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [int(number) for number in ran.stdout.splitlines()]


@pytest.mark.parametrize("suffix", PACK)
def test_a_very_long_line_takes_a_small_multiple_of_its_size(tmp_path, suffix):
    size = 30_000_000
    path = tmp_path / f"a.jsonl{suffix}"
    line = b'{"text": "' + b"x" * size + b'"}\n'
    path.write_bytes(PACK[suffix](b'{"text": "one"}\n' + line + b'{"text": "two"}\n'))
    characters, peak, malformed = peak_of_reading(1 << 28, path)
    assert (characters, malformed) == (size + 6, 0)
    assert peak < 3.6 * size  # the line, a copy of the parser's, and the text
    characters, peak, malformed = peak_of_reading(1_000_000, path)
    assert (characters, malformed) == (6, 1)
    assert peak < 22e6


# Parquet


def some_rows(count, seed=0):
    rng = random.Random(seed)
    return [
        {
            "text": " ".join(rng.choices(["größe", "word", "😀", "\n"], k=rng.randint(0, 50))),
            "meta": {"redpajama_set_name": rng.choice(["C4", "Github"]), "url": None},
            "other": rng.random(),
        }
        for _ in range(count)
    ]


@pytest.fixture
def write(tmp_path):
    def write(rows, name="a.parquet", **options):
        table = pa.Table.from_pylist(rows) if isinstance(rows, list) else rows
        pq.write_table(table, tmp_path / name, **options)
        return tmp_path / name

    return write


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 20])
def test_rows_are_documents_however_they_are_divided(write, monkeypatch, compression, batch_bytes):
    monkeypatch.setattr(readers, "_BATCH_BYTES", batch_bytes)
    rows = some_rows(100)
    path = write(rows, row_group_size=9, compression=compression)
    reader, found = read(path, by_key("meta.redpajama_set_name"))
    assert found == [Document(row["meta"]["redpajama_set_name"], row["text"]) for row in rows]
    assert (reader.malformed.lines, reader.malformed.count) == (100, 0)
    edges: list[Any] = [0, 1, 5, 11, 12, None]
    chunks = [Chunk(0, start, stop) for start, stop in pairwise(edges)]
    reader, found = read(path, chunks=[Chunk(0), *chunks])
    assert texts_of(found) == 2 * [row["text"] for row in rows]
    assert reader.hashes[Chunk(0)] == read(path)[0].hashes[Chunk(0)]
    assert len(set(reader.hashes.values())) == 1 + len(chunks)
    assert read(write(pa.table({"text": pa.array([], pa.string())})))[1] == []


def test_keys_reach_into_structs_and_strings_that_hold_objects(write):
    rows = [
        {"a": {"b": {"text": str(i)}}, "a.b": "x", "meta": f'{{"set": {{"name": "s{i}"}}}}'}
        for i in range(5)
    ]
    _, found = read(write(rows), by_key("meta.set.name"), text_key="a.b.text")
    assert found == [Document(f"s{i}", str(i)) for i in range(5)]
    assert texts_of(read(write(rows), text_key="a.b")[1]) == ["x"] * 5


def test_null_too_long_and_invalid_texts(write):
    texts = ["a" * 100, None, "ä" * 50, "a" * 101, "ä" * 51]
    reader, found = read(write([{"text": text} for text in texts]), max_document_bytes=100)
    assert texts_of(found) == [texts[0], "", texts[2]]
    assert "row 4 has 101 bytes" in reader.malformed.describe()
    assert "row 5 has 102 bytes" in reader.malformed.describe()
    column = pa.array([b"one", b"\xff\xfe", b"two"])
    for text in (column, column.view(pa.string())):
        reader, found = read(write(pa.table({"text": text})))
        assert texts_of(found) == ["one", "two"]
        assert "row 2 is not valid UTF-8 at byte 1" in reader.malformed.describe()
    reader, _ = read(write([{"text": ["a", "list"]}]))
    assert "row 1 has a list" in reader.malformed.describe()


def test_only_the_required_columns_are_read(write):
    rows = [{"text": "a", "meta": {"set": "x", "big": "y" * 1000}, "other": "z" * 1000}] * 50
    path = write(rows, compression="snappy")
    data, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    for number in (2, 3):
        column = metadata.row_group(0).column(number)
        begin = column.dictionary_page_offset
        data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    assert read(path, by_key("meta.set"))[1] == [Document("x", "a")] * 50
    for key in ("meta.big", "other"):
        with pytest.raises(UserError, match="is damaged"):
            read(path, text_key=key)


FUZZ = """
import random, sys
from pathlib import Path
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.errors import UserError

path, domains = Path(sys.argv[1]), DomainOptions(domain_key="meta.redpajama_set_name")
options = SourceOptions(((str(path),),))
whole, rng, rejected = path.read_bytes(), random.Random(0), 0
for _ in range(250):
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        data[rng.choice([rng.randrange(len(data)), -1 - rng.randrange(1500)])] = rng.randrange(256)
    path.write_bytes(data)
    reader = DocumentReader(options, find_sources(options, domains), domains)
    try:
        list(reader.read(Chunk(0)))
    except UserError as error:
        rejected += "\\n" not in str(error)
print(rejected)
"""


def test_damaged_parquet_is_rejected_and_never_crashes_the_process(write):
    path = write(some_rows(200), row_group_size=50, data_page_size=1000)
    ran = subprocess.run([sys.executable, "-c", FUZZ, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 150


def test_memory_does_not_grow_with_a_row_group(write):
    rng = random.Random(0)
    rows = [{"text": rng.randbytes(5000).hex()} for _ in range(10_000)]
    small = write(rows[:50], compression="none")
    large = write(rows, name="b.parquet", compression="none", row_group_size=len(rows))
    assert large.stat().st_size > 90e6
    _, growth, _ = peak_of_reading(1 << 28, small, large)
    assert growth < 90e6  # Arrow's buffers, of constant size
