"""Reading JSON lines and parquet in chunks; malformed lines and damaged files."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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
)
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def reader_of(path, domains=None, **options):
    source = SourceOptions(((str(path),),), **options)
    return DocumentReader(source, find_sources(source, domains), domains)


def read(path, domains=None, chunks=None, **options):
    reader = reader_of(path, domains, **options)
    return reader, [document for chunk in chunks or [Chunk(0)] for document in reader.read(chunk)]


def texts_of(found):
    return [document.text for document in found]


def by_key(key, *renames):
    return DomainOptions(domain_key=key, rename_domain=(renames,))


# Text files


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    text = "first\n\n  second, with a trailing line end\n"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](b"\xef\xbb\xbf" + text.encode()))
    reader, found = read(path)
    assert texts_of(found) == [text.removesuffix("\n")]
    assert (reader.malformed.lines, reader.malformed.count) == (1, 0)


@pytest.mark.parametrize(("content", "reason"), [(b"a\xff", "UTF-8"), (b"word\n" * 9, "bytes")])
def test_a_text_file_that_is_no_text_or_too_long_is_malformed(tmp_path, content, reason):
    path = tmp_path / "a.md"
    path.write_bytes(content)
    reader, found = read(path, max_document_bytes=20)
    assert (found, reader.malformed.count) == ([], 1)
    assert reason in reader.malformed.first[0]


# Compressed files


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_and_truncated_files_are_rejected(tmp_path, suffix):
    rng, path = random.Random(0), tmp_path / f"a.jsonl{suffix}"
    texts = ["".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(600)]
    whole = PACK[suffix](b"".join(b'{"text": "%s"}\n' % text.encode() for text in texts))
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="is truncated"):
            read(path)
    path.write_bytes(b"this was never compressed\n" * 100)
    with pytest.raises(UserError, match="is damaged"):
        read(path)
    rejected = 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            assert texts_of(read(path)[1]) == texts
        except UserError:
            rejected += 1
    assert rejected > len(whole) // 7 * 0.9


# Documents

MALFORMED = {
    b"{not json": "is not JSON",
    b'{"text": NaN}': "has a number",
    b'{"text": "a", "other": NaN,}': "is not JSON",
    b'{"text": "\\ud800", "other": NaN}': "is not JSON",
    b'{"text": "\xff"}': "is not valid UTF-8 at byte",
    b'{"text": "\\ud800"}': "is not JSON",
    b'["text"]': "is not a JSON object but a list",
    b'{"text": 1.5}': "has a number",
    b'{"other": "a"}': "has no key",
    b"[" * 5000: "is not JSON",
}


@pytest.mark.parametrize("key", ["text", "text.text"])
def test_a_malformed_line_is_skipped_and_reported_with_its_number(jsonl, key):
    for line, reason in MALFORMED.items():
        keyed = line.replace(b'"text":', f'"{key}":'.encode())
        path = jsonl("a.jsonl", [{key: "one"}, keyed, {key: "two"}])
        reader, found = read(path, text_key=key)
        assert texts_of(found) == ["one", "two"]
        assert (reader.malformed.lines, reader.malformed.count) == (3, 1)
        assert f"{path}:2 {reason}" in "; ".join(reader.malformed.first)
        reader, _ = read(path, chunks=[Chunk(0, 5, None)], text_key=key)
        at = path.read_bytes().index(keyed)
        assert f"{path}:byte {at} {reason}" in "; ".join(reader.malformed.first)
        with pytest.warns(UserWarning, match="skipped"):
            reader.malformed.check(0.5)
        with pytest.raises(UserError, match="--max-malformed-share"):
            reader.malformed.check(0.49)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_only_python_writes_are_read(jsonl, number):
    path = jsonl("a.jsonl", [f'{{"text": "one", "loss": {number}}}'.encode(), {"text": "two"}])
    reader, found = read(path)
    assert (texts_of(found), reader.malformed.count) == (["one", "two"], 0)


def test_integers_name_domains(jsonl):
    path = jsonl("a.jsonl", [{"text": "a", "cluster": n} for n in (3, 12, "x", 1.5, True)])
    reader, found = read(path, by_key("cluster"))
    assert [document.domain for document in found] == ["3", "12", "x"]
    assert reader.malformed.count == 2


FOREIGN = {
    "array.json": (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "hf:FOLDER"),
    "object.json": (b'{\n "text": "a"\n}\n', "one JSON value"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "lfs pull"),
    "packed.jsonl": (gzip.compress(b'{"text": "a"}\n'), "end in .gz"),
    "wide.txt": ("text".encode("utf-16"), "UTF-16"),
    "archive.jsonl.gz": (gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\x0000"), "tar archive"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_another_format_is_named_with_the_fix(tmp_path, name):
    content, expected = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    if name.endswith(".txt"):  # one document of many
        reader, found = read(tmp_path / name)
        assert (found, reader.malformed.count) == ([], 1)
        assert expected in reader.malformed.first[0]
    else:
        with pytest.raises(UserError, match=expected):
            read(tmp_path / name)


def test_lines_of_json_arrays_are_malformed_lines(jsonl):
    for first in (b"[1, 2]", b"[INFO] started"):
        reader, found = read(jsonl("a.jsonl", [first, {"text": "one"}]))
        assert (texts_of(found), reader.malformed.count) == (["one"], 1)


@pytest.mark.parametrize("ending", [b"\r\n", b"\n", b"\0" * 99])
def test_line_ends_and_zeros_after_gzip_data_are_skipped(tmp_path, ending):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') + ending + gzip.compress(b'{"text": "b"}'))
    assert texts_of(read(path)[1]) == ["a", "b"]
    path.write_bytes(path.read_bytes() + ending)
    assert texts_of(read(path)[1]) == ["a", "b"]
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(UserError, match="damaged"):
        read(path)


def test_a_key_that_every_line_lacks_is_an_error(jsonl, monkeypatch):
    monkeypatch.setattr(readers, "_LINES_BEFORE_GIVING_UP", 3)
    monkeypatch.setattr(readers, "_BLOCK", 16)
    with pytest.raises(UserError, match=r"no key 'text', only content; .*--text-key"):
        read(jsonl("a.jsonl", [{"content": "one"}] * 3 + ["never reached"]))


@pytest.mark.parametrize("odd_line", [[], [b"{"]])
def test_domains_are_renamed_or_left_out_and_counted(jsonl, odd_line):
    lines = [{"text": str(i), "set": name} for i, name in enumerate("ABCDAB")]
    path = jsonl("a.jsonl", [*lines, *odd_line])
    reader, found = read(path, by_key("set", "A=x", "C=x", "B="))
    assert found == [Document(*pair) for pair in (("x", "0"), ("x", "2"), ("D", "3"), ("x", "4"))]
    assert reader.malformed.names == {"A": 2, "B": 2, "C": 1}  # D keeps its name
    assert reader.malformed.count == len(odd_line)


LINES = st.one_of(
    st.text(st.sampled_from('añ😀 \\"\n'), max_size=12).map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
    ),
    st.sampled_from([b"", b"  ", b"{", b'{"text": null}', b'{"text": "%s"}' % (b"x" * 90)]),
)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(LINES, max_size=12),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    mark=st.booleans(),
    ended=st.booleans(),
    edges=st.sets(st.integers(1, 200)),
    block_size=st.integers(1, 120),
    suffix=st.sampled_from([*PACK]),
)
def test_every_division_gives_the_same_documents(
    lines, ending, mark, ended, edges, block_size, suffix
):
    """Compressed files are not divided, even if they have several members or frames."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        path = Path(folder, f"a.jsonl{suffix}")
        data = ending.join(lines) + ending * ended
        content, pack = b"\xef\xbb\xbf" * mark + data, PACK[suffix]
        path.write_bytes(pack(content[:70]) + pack(content[70:]))
        for name in ("_BLOCK", "_COMPRESSED_BLOCK", "_FEWEST_BYTES"):
            monkeypatch.setattr(readers, name, block_size)
        edges = [] if suffix else sorted(edges)
        chunks = [Chunk(0, start, stop) for start, stop in pairwise([0, *edges, None])]
        reader, found = read(path, chunks=chunks)
        assert texts_of(found) == [
            json.loads(line)["text"] or ""
            for line in data.split(b"\n")
            if line.strip() not in (b"", b"{")
        ]
        assert reader.malformed.count == lines.count(b"{")
        assert len(reader.hashes) == len(chunks)
        if not edges:
            assert reader.hashes[chunks[0]] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", [b"shorter", b"longer" * 1000, None])
def test_a_file_that_changes_while_it_is_read_is_rejected(jsonl, change):
    path = jsonl("a.jsonl", ["word " * 100] * 5000)
    reader = reader_of(path)
    documents = reader.read(Chunk(0))
    next(documents)
    path.write_bytes(change or path.read_bytes())
    with pytest.raises(UserError, match="while it was read"):
        list(documents)
    assert not reader.hashes


# Memory


PEAK_OF_READING = """
import json, os, sys
from pathlib import Path
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources

def peak():
    # getrusage would include the memory of this process before exec.
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

for max_document_bytes, *paths in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    for path in paths:
        options = SourceOptions(((path,),), max_document_bytes=max_document_bytes)
        reader = DocumentReader(options, find_sources(options))
        before = peak()
        characters = sum(len(document.text) for document in reader.read(Chunk(0)))
    print(characters, peak() - before, reader.malformed.count, flush=True)
    os._exit(0)
"""


def peaks_of_reading(*runs):
    """Read the files of each run, (max_document_bytes, *paths), in a new process.

    Return values for the last file of each run: the characters of its text, the growth of memory in
    bytes, and its number of malformed lines.
    """
    command = [sys.executable, "-c", PEAK_OF_READING, json.dumps(runs, default=str)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return [[int(number) for number in line.split()] for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("suffix", PACK)
def test_memory_depends_on_the_longest_line_and_not_on_the_file(tmp_path, suffix):
    size = 30_000_000
    small, many, long = (tmp_path / f"{name}.jsonl{suffix}" for name in ("small", "many", "long"))
    one = b'{"text": "' + b"all the same " * 20 + b'"}\n'
    small.write_bytes(PACK[suffix](one))
    many.write_bytes(PACK[suffix](one * 120_000))
    long.write_bytes(PACK[suffix](one + b'{"text": "' + b"x" * size + b'"}\n' + one))
    runs = (1 << 28, small, many), (1 << 28, small, long), (1_000_000, small, long)
    characters, peaks, malformed = zip(*peaks_of_reading(*runs), strict=True)
    assert characters == (120_000 * 260, size + 520, 520)
    assert malformed == (0, 0, 1)
    assert peaks[0] < 26e6
    assert peaks[1] < 3.6 * size  # for the line, the parser's copy, and the text
    assert peaks[2] < 22e6


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
    chunks = [Chunk(0, *edges) for edges in ((0, 1), (1, 5), (5, 11), (11, 12), (12, None))]
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


@pytest.mark.parametrize("key", ["text", "meta.set"])
def test_a_key_of_several_columns_is_an_error(write, key):
    column = pa.array(["a"]) if key == "text" else pa.array([{"set": "a"}])
    name = key.partition(".")[0]
    with pytest.raises(UserError, match=f"has 2 columns '{name}'; rename all but the one"):
        read(write(pa.Table.from_arrays([column, column], [name, name])), text_key=key)


def test_null_is_an_empty_text_and_long_or_invalid_texts_are_malformed(write):
    texts = ["a" * 100, None, "ä" * 50, "a" * 101, "ä" * 51]
    reader, found = read(write([{"text": text} for text in texts]), max_document_bytes=100)
    assert texts_of(found) == [texts[0], "", texts[2]]
    assert "row 4 has 101 bytes" in "; ".join(reader.malformed.first)
    assert "row 5 has 102 bytes" in "; ".join(reader.malformed.first)
    column = pa.array([b"one", b"\xff\xfe", b"two"])
    for text in (column, column.view(pa.string())):
        reader, found = read(write(pa.table({"text": text})))
        assert texts_of(found) == ["one", "two"]
        assert "row 2 is not valid UTF-8 at byte 1" in "; ".join(reader.malformed.first)
    reader, _ = read(write([{"text": ["a", "list"]}]))
    assert "row 1 has a list" in "; ".join(reader.malformed.first)


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
from megatron_chameleon.errors import UserError
from tests.unit.corpus.test_readers import by_key, read

path = Path(sys.argv[1])
whole, rng, rejected = path.read_bytes(), random.Random(0), 0
for _ in range(250):
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        data[rng.choice([rng.randrange(len(data)), -1 - rng.randrange(1500)])] = rng.randrange(256)
    path.write_bytes(data)
    try:
        read(path, by_key("meta.redpajama_set_name"))
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
    ((_, growth, _),) = peaks_of_reading((1 << 28, small, large))
    assert growth < 90e6  # Arrow's buffers have a constant size
