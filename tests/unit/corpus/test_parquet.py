from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_chameleon.corpus import readers
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader, row_group_bytes
from megatron_chameleon.corpus.records import Document
from megatron_chameleon.corpus.sources import Piece, find_sources
from megatron_chameleon.errors import UserError

META = pa.struct([("redpajama_set_name", pa.string()), ("url", pa.string())])


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
    def write(rows, schema=None, name="a.parquet", **options):
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows, schema), path, **options)
        return path

    return write


def reader_of(path, domain_key=None, domain="d", **options):
    given = str(path) if domain_key else f"{domain}={path}"
    domains = DomainOptions(domain_key=domain_key)
    source = SourceOptions(((given,),), **options)
    return DocumentReader(source, find_sources(source, domains), domains)


def read(path, domain_key=None, pieces=None, **options):
    reader = reader_of(path, domain_key, **options)
    return reader, [document for piece in pieces or [Piece(0)] for document in reader.read(piece)]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("row_group_size", [7, 100])
def test_rows_are_documents(write, compression, row_group_size):
    rows = some_rows(100)
    path = write(rows, compression=compression, row_group_size=row_group_size)
    reader, found = read(path, "meta.redpajama_set_name")
    assert found == [Document(row["meta"]["redpajama_set_name"], row["text"]) for row in rows]
    assert (reader.malformed.lines, reader.malformed.count) == (100, 0)
    assert read(path)[1] == [Document("d", row["text"]) for row in rows]


@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 20])
def test_batches_and_pieces_do_not_show(write, monkeypatch, batch_bytes):
    rows = some_rows(100)
    path = write(rows, row_group_size=9)
    expected, found = read(path)
    monkeypatch.setattr(readers, "_BATCH_BYTES", batch_bytes)
    cuts = pairwise([0, 1, 5, 11, 12])
    pieces = [*(Piece(0, start, stop) for start, stop in cuts), Piece(0, 12)]
    reader, pieced = read(path, pieces=[Piece(0), *pieces])
    assert pieced == found + found
    assert reader.hashes[Piece(0)] == expected.hashes[Piece(0)]
    assert len(set(reader.hashes.values())) == 1 + len(pieces)


def test_keys_reach_into_structs_and_strings_that_hold_objects(write):
    rows = [
        {"a": {"b": {"text": str(i)}}, "a.b": "x", "meta": f'{{"set": {{"name": "s{i}"}}}}'}
        for i in range(5)
    ]
    _, found = read(write(rows), "meta.set.name", text_key="a.b.text")
    assert found == [Document(f"s{i}", str(i)) for i in range(5)]
    assert [text for _, text, _ in read(write(rows), text_key="a.b")[1]] == ["x"] * 5


def test_a_null_text_is_an_empty_document(write):
    rows = [{"text": "a", "set": "x"}, {"text": None, "set": "x"}, {"text": "b", "set": None}]
    reader, found = read(write(rows))
    assert [document.text for document in found] == ["a", "", "b"]
    assert reader.malformed.count == 0
    reader, found = read(write(rows), "set")
    assert [document.text for document in found] == ["a", ""]
    assert "a.parquet:row 3 has 0 bytes of domain name" in reader.malformed.describe()


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
)
def test_text_may_be_of_any_type_that_holds_it(write, kind):
    array = pa.array(["größe", "b", "b"]).cast(pa.string())
    column = array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)
    path = write([{"x": 1}])
    pq.write_table(pa.table({"text": column}), path)
    assert [document.text for document in read(path)[1]] == ["größe", "b", "b"]


def test_what_is_no_text_is_counted_and_told_with_its_row(write):
    column = pa.array([b"one", b"\xff\xfe", b"two"])
    path = write([{"x": 1}])
    for text in (column, column.view(pa.string())):
        pq.write_table(pa.table({"text": text}), path)
        reader, found = read(path)
        assert [document.text for document in found] == ["one", "two"]
        assert "1 of 3 lines are malformed" in reader.malformed.describe()
        assert "a.parquet:row 2 is not valid UTF-8 at byte 1" in reader.malformed.describe()
    path = write([{"text": ["a", "list"]}])
    assert "row 1 has a list at 'text', not a string" in read(path)[0].malformed.describe()


def test_a_text_that_is_too_long_is_malformed(write):
    texts = ["a" * 100, "ä" * 50, "a" * 101, "ä" * 51, "b"]
    reader, found = read(write([{"text": text} for text in texts]), max_document_bytes=100)
    assert [document.text for document in found] == [texts[0], texts[1], "b"]
    assert "row 3 has 101 bytes of text, more than --max-doc" in reader.malformed.describe()
    assert "row 4 has 102 bytes of text" in reader.malformed.describe()


@pytest.mark.parametrize("key", ["text", "text.in"])
def test_two_columns_of_one_name_are_rejected(tmp_path, key):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(UserError, match="2 columns 'text'"):
        read(path, text_key=key)


def test_only_the_columns_that_are_needed_are_read(write):
    rows = [{"text": "a", "meta": {"set": "x", "big": "y" * 1000}, "other": "z" * 1000}] * 50
    path = write(rows, compression="snappy")
    data, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    for number in (2, 3):
        column = metadata.row_group(0).column(number)
        begin = column.dictionary_page_offset
        data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    assert read(path, "meta.set")[1] == [Document("x", "a")] * 50
    for key in ("meta.big", "other"):
        with pytest.raises(UserError, match="is damaged or truncated"):
            read(path, text_key=key)


def test_a_file_of_no_rows_has_no_documents(write):
    path = write([], schema=pa.schema([("text", pa.string())]))
    assert read(path)[1] == []


def test_files_that_are_cut_short_or_are_none_are_refused(write):
    path = write(some_rows(500))
    whole = path.read_bytes()
    for length in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        for refused in (read, lambda path: row_group_bytes(str(path))):
            with pytest.raises(UserError, match=r"a\.parquet is damaged or truncated: ") as told:
                refused(path)
            assert "\n" not in str(told.value)
    path.write_bytes(whole.replace(b"url", b"\xff\xfe\xfd"))  # the name of a column
    with pytest.raises(UserError, match=r"a\.parquet is damaged or truncated: .*utf-8"):
        read(path)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet.*; correct --input"):
        row_group_bytes(str(path))


FUZZ = """
import random, sys
from pathlib import Path
from megatron_chameleon.corpus.sources import Piece
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.errors import UserError
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions

path, domains = Path(sys.argv[1]), DomainOptions(domain_key="meta.redpajama_set_name")
options = SourceOptions(((str(path),),))
whole, rng, refused = path.read_bytes(), random.Random(0), 0
for _ in range(250):
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        data[rng.choice([rng.randrange(len(data)), -1 - rng.randrange(1500)])] = rng.randrange(256)
    path.write_bytes(data)
    reader = DocumentReader(options, find_sources(options, domains), domains)
    try:
        list(reader.read(Piece(0)))
    except UserError as error:
        refused += "\\n" not in str(error)
print(refused)
"""


def test_damage_is_refused_or_counted_and_never_ends_the_process(write):
    path = write(some_rows(200), row_group_size=50, data_page_size=1000)
    ran = subprocess.run([sys.executable, "-c", FUZZ, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 150


PEAK = """
import sys
from pathlib import Path
from megatron_chameleon.corpus.sources import Piece
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions

peaks = []
for path in sys.argv[1:]:
    options = SourceOptions(((path,),))
    reader = DocumentReader(options, find_sources(options))
    for _ in reader.read(Piece(0)):
        pass
    # Not getrusage, which counts what the process had before it became this one.
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    peaks.append(1024 * int(peak.split()[0]))
print(peaks[1] - peaks[0])
"""


def test_memory_does_not_grow_with_a_row_group(write):
    rng = random.Random(0)
    rows = [{"text": rng.randbytes(5000).hex()} for _ in range(10_000)]
    small = write(rows[:50], compression="none")
    large = write(rows, name="b.parquet", compression="none", row_group_size=len(rows))
    assert large.stat().st_size > 90e6
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(small), str(large)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 90e6  # what Arrow keeps at hand; it does not grow from there on
