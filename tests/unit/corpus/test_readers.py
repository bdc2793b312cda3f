from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from megatron_chameleon.corpus import malformed
from megatron_chameleon.corpus.readers import Document, DocumentReader
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.source import SourceOptions


def read(path, domain_key=None, **options):
    reader = DocumentReader(SourceOptions(((str(path),),), **options), domain_key)
    return reader, list(reader)


def test_documents_come_in_order_with_their_domain(jsonl):
    first, second = jsonl("a.jsonl", ["one", "two"]), jsonl("b.jsonl", ["three"])
    reader = DocumentReader(SourceOptions(((f"x={first}", f"y={second}"),)))
    assert list(reader) == [Document("x", "one"), Document("x", "two"), Document("y", "three")]
    assert reader.malformed.count == 0
    assert reader.malformed.lines == 3


def test_keys_reach_into_nested_objects(jsonl):
    path = jsonl("a.jsonl", [{"doc": {"body": "one"}, "meta": {"set": {"name": "web"}}}])
    _, found = read(path, "meta.set.name", text_key="doc.body")
    assert found == [Document("web", "one")]


def test_a_key_with_a_dot_in_it_comes_before_a_path(jsonl):
    path = jsonl("a.jsonl", [{"a.b": "flat", "a": {"b": "nested"}}])
    assert read(path, text_key="a.b")[1] == [Document("", "flat")]


def test_blank_lines_a_byte_order_mark_and_carriage_returns_do_no_harm(jsonl):
    path = jsonl("a.jsonl", [b'\xef\xbb\xbf{"text": "one"}\r', b"", b"  \r", b'{"text": "two"}\r'])
    reader, found = read(path)
    assert [document.text for document in found] == ["one", "two"]
    assert reader.malformed.lines == 2


MALFORMED = {
    b"{not json": "is not JSON",
    b'{"text": "cut': "is not JSON",
    b'{"text": NaN}': "is not JSON",
    b'{"text": "\xff"}': "is not valid UTF-8 at byte 11",
    b'{"text": "\\ud800"}': "is not JSON",
    b'["text"]': "is not a JSON object but a list",
    b"17": "is not a JSON object but a number",
    b'{"text": null}': "has null at 'text', not a string",
    b'{"text": true}': "has a truth value at 'text'",
    b'{"text": ["a"]}': "has a list at 'text'",
    b'{"other": "a"}': "has no key 'text'",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_left_out_and_told_with_its_number(jsonl, line):
    path = jsonl("a.jsonl", ["one", line, "two"])
    reader, found = read(path)
    assert [document.text for document in found] == ["one", "two"]
    assert reader.malformed.count == 1
    assert f"1 of 3 lines are malformed: {path}:2 {MALFORMED[line]}" in reader.malformed.describe()


def test_the_first_ten_malformed_lines_are_shown(jsonl):
    reader, _ = read(jsonl("a.jsonl", ["one", *[b"{"] * 13]))
    told = reader.malformed.describe()
    assert told.startswith("13 of 14 lines")
    assert [f"a.jsonl:{number} " in told for number in range(1, 15)] == [
        2 <= number <= 11 for number in range(1, 15)
    ]
    assert told.endswith("; and 3 more")


@pytest.mark.parametrize(
    ("share", "refused"), [(0.0, True), (0.24, True), (0.25, False), (1, False)]
)
def test_malformed_lines_end_the_run_beyond_a_share(jsonl, share, refused):
    reader, _ = read(jsonl("a.jsonl", ["one", b"{", "two", "three"]))
    if not refused:
        reader.malformed.check(share)
        return
    with pytest.raises(UserError, match=r"1 of 4 lines .*a.jsonl:2 .*more than --max-malformed"):
        reader.malformed.check(share)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_zero_to_one(jsonl, share):
    with pytest.raises(UserError, match="--max-malformed-share"):
        read(jsonl("a.jsonl", ["one"]), max_malformed_share=share)


def test_a_text_key_that_no_line_has_is_told_with_the_keys_there_are(jsonl):
    path = jsonl("a.jsonl", [{"content": "one", "meta": {"id": 1}}] * 3)
    with pytest.raises(
        UserError, match=r"a.jsonl: no line has the key 'text'.*content, meta, meta\.id.*--text-key"
    ):
        read(path)


def test_a_domain_key_that_no_line_has_is_told_likewise(jsonl):
    path = jsonl("a.jsonl", ["one", "two"])
    with pytest.raises(UserError, match=r"no line has the key 'set'.* text: correct --domain-key"):
        read(path, "set")


def test_a_long_file_without_the_key_is_not_read_to_its_end(jsonl, monkeypatch):
    monkeypatch.setattr(malformed, "LINES_BEFORE_GIVING_UP", 5)
    path = jsonl("a.jsonl", [{"content": "one"}] * 5 + ["never reached"])
    with pytest.raises(UserError, match="no line has the key 'text'"):
        read(path)


def test_a_domain_name_that_is_a_whole_text_is_malformed(jsonl):
    path = jsonl(
        "a.jsonl",
        [{"text": "t", "set": "web"}, {"text": "t", "set": "long " * 50}, {"text": "t", "set": ""}],
    )
    reader, found = read(path, "set")
    assert found == [Document("web", "t")]
    assert "has 250 bytes of domain name" in reader.malformed.describe()
    assert "has 0 bytes of domain name" in reader.malformed.describe()


def test_files_are_hashed_and_progress_adds_up(jsonl):
    path = jsonl("a.jsonl", ["word " * 1000] * 300)
    counted: list[int] = []
    reader = DocumentReader(SourceOptions(((str(path),),)), on_bytes=counted.append)
    list(reader)
    assert sum(counted) == reader.total_bytes == path.stat().st_size
    assert reader.hashes == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}


def test_memory_does_not_grow_with_the_file(jsonl):
    path = jsonl("a.jsonl", ["word " * 200] * 20_000)
    reader = DocumentReader(SourceOptions(((str(path),),)))
    tracemalloc.start()
    for _ in reader:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 20e6
    assert peak < 3e6
