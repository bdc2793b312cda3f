from __future__ import annotations

import gzip
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import readers as lines
from megatron_chameleon.corpus.readers import read_lines
from megatron_chameleon.corpus.records import LineTooLong
from megatron_chameleon.errors import UserError

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}
PARTS = [b"\n", b"\r\n", b"a", "é😀".encode(), b"word " * 5]
NO_LIMIT = 1 << 40


def no_progress(block):
    pass


def lines_of(path, start=0, stop=None, on_block=no_progress, longest=NO_LIMIT):
    """Where each line begins, and the line; of one that is too long its length."""
    found = []
    for begin, several in read_lines(str(path), on_block, longest, start, stop):
        for line in several:
            found.append((begin, len(line) if isinstance(line, LineTooLong) else bytes(line)))
            begin += len(line) + 1
    return found


def lines_reference(data):
    """Where each line begins, and the line, in plain words."""
    found, begin = [], 0
    for line in data.split(b"\n"):
        found.append((begin, line))
        begin += len(line) + 1
    return found if data and not data.endswith(b"\n") else found[:-1]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("block_size", [1, 7, 1 << 18])
def test_lines_are_those_of_the_file(tmp_path, monkeypatch, suffix, block_size):
    monkeypatch.setattr(lines, "_BLOCK", block_size)
    monkeypatch.setattr(lines, "_COMPRESSED_BLOCK", block_size)
    monkeypatch.setattr(lines, "_FEWEST_BYTES", 1)
    rng = random.Random(block_size)
    data = bytes(rng.choice(b"ab\n\r ") for _ in range(5000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](data))
    assert lines_of(path) == lines_reference(data)


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"\n", b"\r\n", b"a", "é😀".encode(), b"word " * 5])).map(
        b"".join
    ),
    cuts=st.sets(st.integers(1, 60)),
    block_size=st.integers(1, 70),
)
def test_pieces_neither_share_nor_lose_a_line_wherever_they_meet(data, cuts, block_size):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(lines, "_BLOCK", block_size)
        monkeypatch.setattr(lines, "_COMPRESSED_BLOCK", block_size)
        path = Path(folder, "a.jsonl")
        path.write_bytes(data)
        edges = [0, *sorted(cuts), None]
        for start, stop in pairwise(edges):
            expected = [
                (begin, line)
                for begin, line in lines_reference(data)
                if start <= begin and (stop is None or begin < stop)
            ]
            seen: list[bytes] = []
            assert lines_of(path, start, stop, seen.append) == expected
            begin = expected[0][0] if expected else 0
            length = sum(len(line) + 1 for _, line in expected)
            assert b"".join(seen) == data[begin : begin + length]


@pytest.mark.parametrize("longest", [0, 4, 5, 30])
@pytest.mark.parametrize("block_size", [1, 7, 1000])
def test_lines_that_are_too_long_are_only_measured(tmp_path, monkeypatch, longest, block_size):
    monkeypatch.setattr(lines, "_BLOCK", block_size)
    data = b"four\nfive5\n" + b"x" * 31 + b"\n\n" + b"y" * 30
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    expected = [
        (begin, line if len(line) <= longest else len(line))
        for begin, line in lines_reference(data)
    ]
    assert lines_of(path, longest=longest) == expected


@pytest.mark.parametrize("suffix", PACK)
def test_several_members_are_read_as_one(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"one\ntw") + PACK[suffix](b"o\nthree"))
    assert [line for _, line in lines_of(path)] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("suffix", PACK)
def test_an_empty_file_has_no_lines(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b""))
    assert lines_of(path) == []
    path.write_bytes(b"")
    assert lines_of(path) == []


@pytest.mark.parametrize("suffix", PACK)
def test_blocks_are_the_bytes_on_disk(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](bytes(range(256)) * 5000))
    seen: list[bytes] = []
    lines_of(path, on_block=seen.append)
    assert b"".join(seen) == path.read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path, suffix):
    whole = PACK[suffix](bytes(random.Random(0).choices(b"abc\n", k=2000)))
    path = tmp_path / f"a.jsonl{suffix}"
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="is truncated"):
            lines_of(path)


@pytest.mark.parametrize("zeros", [1, 511, 1 << 20])
def test_zeros_that_fill_a_gz_file_up_are_passed_over(tmp_path, zeros):
    path = tmp_path / "a.jsonl.gz"
    member = gzip.compress(b"one\n")
    path.write_bytes(member + bytes(zeros) + member + bytes(zeros))
    assert lines_of(path) == lines_reference(b"one\none\n")
    path.write_bytes(bytes(zeros) + member)
    with pytest.raises(UserError, match="is damaged"):
        lines_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"this was never compressed\n" * 100)
    with pytest.raises(UserError, match="is damaged"):
        lines_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_flipped_byte_is_an_error_or_changes_nothing_that_is_checked(tmp_path, suffix):
    data = bytes(random.Random(0).choices(b"abc\n", k=3000))
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    whole = pack[suffix](data)
    path = tmp_path / f"a.jsonl{suffix}"
    refused = 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            assert lines_of(path) == lines_reference(data)
        except UserError:
            refused += 1
    assert refused > len(whole) // 7 * 0.9
