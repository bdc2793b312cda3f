from __future__ import annotations

import gzip
import random

import pytest
import zstandard

from megatron_chameleon.corpus import lines
from megatron_chameleon.corpus.lines import read_lines
from megatron_chameleon.errors import UserError

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def no_progress(block):
    pass


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("block_size", [1, 7, 1 << 18])
def test_lines_are_those_of_the_file(tmp_path, monkeypatch, suffix, block_size):
    monkeypatch.setattr(lines, "_BLOCK", block_size)
    rng = random.Random(block_size)
    data = bytes(rng.choice(b"ab\n\r ") for _ in range(5000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](data))
    found = list(read_lines(path, no_progress))
    expected = data.split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize("suffix", PACK)
def test_several_members_are_read_as_one(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"one\ntw") + PACK[suffix](b"o\nthree"))
    assert list(read_lines(path, no_progress)) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("suffix", PACK)
def test_an_empty_file_has_no_lines(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b""))
    assert list(read_lines(path, no_progress)) == []
    path.write_bytes(b"")
    assert list(read_lines(path, no_progress)) == []


@pytest.mark.parametrize("suffix", PACK)
def test_blocks_are_the_bytes_on_disk(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](bytes(range(256)) * 3000))
    seen: list[bytes] = []
    list(read_lines(path, seen.append))
    assert b"".join(seen) == path.read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path, suffix):
    whole = PACK[suffix](bytes(random.Random(0).choices(b"abc\n", k=2000)))
    path = tmp_path / f"a.jsonl{suffix}"
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="is cut short"):
            list(read_lines(path, no_progress))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"this was never compressed\n" * 100)
    with pytest.raises(UserError, match="is damaged"):
        list(read_lines(path, no_progress))


def test_a_file_that_is_gone_is_told(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl: No such file"):
        list(read_lines(tmp_path / "a.jsonl", no_progress))
