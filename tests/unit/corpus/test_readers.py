from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import readers as lines
from megatron_chameleon.corpus import records as malformed
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.records import Document
from megatron_chameleon.corpus.sources import Piece, find_sources
from megatron_chameleon.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def reader_of(*inputs, domains=None, **options):
    source = SourceOptions((tuple(str(path) for path in inputs),), **options)
    sources = find_sources(source, domains)
    return DocumentReader(source, sources, domains), sources


def read(*inputs, domains=None, **options):
    reader, sources = reader_of(*inputs, domains=domains, **options)
    return reader, [doc for i in range(len(sources)) for doc in reader.read(Piece(i))]


def by_key(key, *renames):
    return DomainOptions(domain_key=key, rename_domain=(renames,))


MALFORMED = {
    b"{not json": "is not JSON",
    b'{"text": "cut': "is not JSON",
    b'{"text": NaN}': "is not JSON",
    b'{"text": "\xff"}': "is not valid UTF-8 at byte 11",
    b'{"text": "\\ud800"}': "is not JSON",
    b'["text"]': "is not a JSON object but a list",
    b'"text"': "is not a JSON object but a string",
    b"17": "is not a JSON object but a number",
    b"null": "is not a JSON object but null",
    b'{"text": 1.5}': "has a number at 'text', not a string",
    b'{"text": true}': "has a boolean at 'text'",
    b'{"text": ["a"]}': "has a list at 'text'",
    b'{"text": {"a": 1}}': "has an object at 'text'",
    b'{"other": "a"}': "has no key 'text'",
    b"[" * 5000: "is not JSON",
}


@pytest.mark.parametrize("line", MALFORMED)
@pytest.mark.parametrize("key", ["text", "text.text"])
def test_a_malformed_line_is_left_out_and_told_with_its_number(jsonl, line, key):
    good = [{key: "one"}, {key: "two"}]
    path = jsonl("a.jsonl", [good[0], line.replace(b'"text":', f'"{key}":'.encode()), good[1]])
    reader, found = read(path, text_key=key)
    assert [document.text for document in found] == ["one", "two"]
    assert reader.malformed.count == 1
    reason = MALFORMED[line].replace("'text'", f"'{key}'").replace("11", f"{7 + len(key)}")
    assert f"1 of 3 lines are malformed: {path}:2 {reason}" in reader.malformed.describe()


@pytest.mark.parametrize(
    ("share", "refused"), [(0.0, True), (0.24, True), (0.25, False), (1, False)]
)
def test_malformed_lines_end_the_run_beyond_a_share(jsonl, share, refused):
    reader, _ = read(jsonl("a.jsonl", ["one", b"{", "two", "three"]))
    if not refused:
        reader.malformed.check(share)
        return
    with pytest.raises(UserError, match=r"1 of 4 lines .*a.jsonl:2 .*exceeds --max-malformed"):
        reader.malformed.check(share)


def test_a_text_key_that_no_line_has_is_told_with_the_keys_there_are(jsonl):
    records = [{"content": "one", "meta": {"id": 1}, "more": '{"deep": {"er": 2}}'}] * 3
    with pytest.raises(
        UserError,
        match=r"a.jsonl: no line has the key 'text'.*content, meta, meta\.id, more, more\.deep, "
        r"more\.deep\.er; correct --text-key",
    ):
        read(jsonl("a.jsonl", records))


def test_a_long_file_without_the_key_is_not_read_to_its_end(jsonl, monkeypatch):
    monkeypatch.setattr(malformed, "LINES_BEFORE_GIVING_UP", 5)
    path = jsonl("a.jsonl", [{"content": "one"}] * 5 + ["never reached"])
    with pytest.raises(UserError, match="no line has the key 'text'"):
        read(path)


def test_a_domain_name_that_is_a_whole_text_is_malformed(jsonl):
    records = [
        {"text": "t", "set": "web"},
        {"text": "t", "set": "long " * 50},
        {"text": "t", "set": ""},
        {"text": "t", "set": None},
        {"text": "t", "set": 7},
    ]
    reader, found = read(jsonl("a.jsonl", records), domains=by_key("set"))
    assert found == [Document("web", "t")]
    told = reader.malformed.describe()
    assert "has 250 bytes of domain name at 'set', not 1 to 80" in told
    assert told.count("has 0 bytes of domain name") == 2
    assert "has a number at 'set'" in told


@pytest.mark.parametrize("odd_line", [[], [b"{"]])
def test_domains_are_renamed_or_left_out_and_counted(jsonl, odd_line):
    names = ["A", "B", "C", "D", "A", "B"]
    records = [{"text": str(i), "set": name} for i, name in enumerate(names)]
    reader, found = read(
        jsonl("a.jsonl", [*records, *odd_line]), domains=by_key("set", "A=x", "C=x", "B=")
    )
    assert found == [Document("x", "0"), Document("x", "2"), Document("D", "3"), Document("x", "4")]
    assert reader.malformed.unwanted == {"B": 2}
    assert reader.malformed.describe_unwanted() == "--rename-domain leaves out 2 documents, of 'B'"
    assert reader.malformed.count == len(odd_line)
    again = malformed.MalformedLines()
    again.add_record(reader.malformed.record)
    again.add_record(reader.malformed.record)
    assert again.unwanted == {"B": 4}


def test_pieces_are_hashed_and_progress_adds_up(jsonl):
    path = jsonl("a.jsonl", ["word " * 1000] * 300)
    counted: list[int] = []
    reader, (source,) = reader_of(path)
    reader.on_bytes = counted.append
    list(reader.read(Piece(0)))
    assert sum(counted) == source.bytes == path.stat().st_size
    assert reader.hashes == {Piece(0): hashlib.sha256(path.read_bytes()).hexdigest()}


records = st.lists(
    st.one_of(
        st.text(st.sampled_from('añ😀 \\"\n'), max_size=12).map(
            lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
        ),
        st.sampled_from(
            [b"", b"  ", b"{", b'{"text": null}', b'{"text": "long ' + b"x" * 90 + b'"}']
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    records=records,
    ending=st.sampled_from([b"\n", b"\r\n"]),
    mark=st.booleans(),
    ended=st.booleans(),
    cuts=st.sets(st.integers(1, 200)),
    block_size=st.integers(1, 120),
)
def test_every_cutting_gives_the_same_documents(records, ending, mark, ended, cuts, block_size):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        path = Path(folder, "a.jsonl")
        data = b"\xef\xbb\xbf" * mark + ending.join(records) + ending * ended
        path.write_bytes(data)
        expected = documents_reference(data)
        monkeypatch.setattr(lines, "_BLOCK", block_size)
        reader, _ = reader_of(path)
        edges = [0, *sorted(cuts), None]
        pieces = [Piece(0, start, stop) for start, stop in pairwise(edges)]
        assert [doc.text for piece in pieces for doc in reader.read(piece)] == expected
        assert reader.malformed.count == sum(record == b"{" for record in records)
        assert len(reader.hashes) == len(pieces)


def documents_reference(data):
    """The texts, in plain words."""
    found = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip() and line.strip() != b"{":
            found.append(json.loads(line)["text"] or "")
    return found


def test_a_malformed_line_of_a_piece_is_told_with_the_byte_where_it_begins(jsonl):
    path = jsonl("a.jsonl", ["one"] * 50 + [b"{bad"] + ["two"] * 50)
    begin = path.read_bytes().index(b"{bad")
    reader, _ = reader_of(path)
    list(reader.read(Piece(0, 100, None)))
    assert f"{path}:byte {begin} is not JSON" in reader.malformed.describe()


@pytest.mark.parametrize("change", [b"shorter", b"longer" * 1000])
def test_a_file_that_changes_while_it_is_read_is_refused(jsonl, change):
    path = jsonl("a.jsonl", ["word " * 100] * 5000)
    reader, _ = reader_of(path)
    documents = reader.read(Piece(0))
    next(documents)
    path.write_bytes(change)
    with pytest.raises(UserError, match=r"a.jsonl has changed while it was read: it had 2\d*"):
        list(documents)
    assert not reader.hashes


def test_a_file_that_is_written_anew_while_it_is_read_is_refused(jsonl):
    path = jsonl("a.jsonl", ["one", "two"])
    reader, _ = reader_of(path)
    documents = reader.read(Piece(0))
    next(documents)
    path.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="was written to while it was read"):
        list(documents)


def test_a_file_that_changed_before_it_is_read_or_is_gone_is_refused(jsonl):
    path = jsonl("a.jsonl", ["one", "two"])
    reader, _ = reader_of(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="has changed while it was read"):
        list(reader.read(Piece(0)))
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl: No such file"):
        list(reader.read(Piece(0)))


def test_memory_does_not_grow_with_the_file(jsonl):
    path = jsonl("a.jsonl", ["word " * 200] * 20_000)
    reader, _ = reader_of(path)
    tracemalloc.start()
    for _ in reader.read(Piece(0)):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 20e6
    assert peak < 8e6


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_memory_does_not_grow_with_what_repetition_unpacks_to(tmp_path, suffix):
    line = b'{"text": "' + b"all the same " * 20 + b'"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](line * 80_000))
    reader, _ = reader_of(path)
    tracemalloc.start()
    assert sum(1 for _ in reader.read(Piece(0))) == 80_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 22e6


PEAK_OF_READING = """
import sys
from pathlib import Path
from megatron_chameleon.corpus.sources import Piece
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.corpus.options import SourceOptions

options = SourceOptions(((sys.argv[1],),), max_document_bytes=int(sys.argv[2]))
reader = DocumentReader(options, find_sources(options))
def peak():
    # Not getrusage, which counts what the process had before it became this one.
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak()
print(*(len(document.text) for document in reader.read(Piece(0))))
print(peak() - before)
print(reader.malformed.describe())
"""


def peak_of_reading(path, max_document_bytes):
    """Lengths of the texts, what memory grew by, what was said of malformed lines."""
    command = [sys.executable, "-c", PEAK_OF_READING, str(path), str(max_document_bytes)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lengths, peak, told = ran.stdout.splitlines()
    return [int(length) for length in lengths.split()], int(peak), told


@pytest.mark.parametrize("suffix", PACK)
def test_a_very_long_line_takes_a_small_multiple_of_its_size(tmp_path, suffix):
    size = 30_000_000
    path = tmp_path / f"a.jsonl{suffix}"
    line = b'{"text": "' + b"x" * size + b'"}\n'
    path.write_bytes(PACK[suffix](b'{"text": "one"}\n' + line + b'{"text": "two"}\n'))
    lengths, peak, _ = peak_of_reading(path, 1 << 28)
    assert lengths == [3, size, 3]
    assert peak < 3.6 * size  # the line, a copy of the parser's, and the text
    lengths, peak, told = peak_of_reading(path, 1_000_000)
    assert lengths == [3, 3]
    assert f"{path}:2 has 30,000,012 bytes, more than --max-document-bytes" in told
    assert peak < 22e6


def test_while_a_long_document_is_worked_on_it_is_held_once(jsonl):
    size = 20_000_000
    reader, _ = reader_of(jsonl("a.jsonl", ["one", "x" * size, "two"]))
    held = []
    tracemalloc.start()
    for _ in reader.read(Piece(0)):
        current, _ = tracemalloc.get_traced_memory()
        held.append(current)
    tracemalloc.stop()
    assert size < max(held) < 1.2 * size


def test_too_little_memory_for_a_line_ends_the_run_rather_than_leave_it_out(jsonl, monkeypatch):
    def refuse(line):
        raise orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0)

    monkeypatch.setattr(orjson, "loads", refuse)
    with pytest.raises(UserError, match=r"not enough memory.*smaller --max-document-bytes"):
        read(jsonl("a.jsonl", ["one"]))
