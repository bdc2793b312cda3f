"""Opening .bin/.idx files: Megatron's are read, and damaged ones refused, whatever the damage."""

from __future__ import annotations

import dataclasses
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus import indexed
from megatron_chameleon.corpus.indexed import (
    ExpectedTokens,
    IndexedWriter,
    TokenFile,
    open_split,
    open_token_file,
    open_tokens,
)
from megatron_chameleon.errors import UserError
from tests.small_corpus import write_small_corpus

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16")
HEADER_BYTES = 34
DOCUMENTS = [[7, 40_000, 9], [], [1, 2, 65_499, 4, 5], [6]]
LENGTHS = [len(document) for document in DOCUMENTS]
EXPECTED = ExpectedTokens("uint16", len(DOCUMENTS), sum(LENGTHS))


@contextmanager
def new_prefix() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "a.b"


def path_of(prefix: Path, suffix: str) -> Path:
    return Path(f"{prefix}{suffix}")


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS) -> Path:
    writer = IndexedWriter(prefix, "uint16")
    for document in documents:
        writer.add(np.array(document, dtype=np.int64))
    writer.finish()
    return prefix


def sequences(file: TokenFile) -> list[list[int]]:
    return [file.get(i).tolist() for i in range(len(file))]


def build(prefix: Path, dtype: str, documents: list[list[list[int]]]) -> Path:
    """Write documents of several sequences as Megatron does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def assert_holds(file: TokenFile, dtype: str, documents: list[list[list[int]]]) -> None:
    assert sequences(file) == [sequence for document in documents for sequence in document]
    assert np.diff(file.document_boundaries).tolist() == [len(d) for d in documents]
    assert file.dtype == np.dtype(dtype)
    ends = np.cumsum(file.lengths, dtype=np.int64)
    assert file.starts.tolist() == (ends - file.lengths).tolist()
    assert file.tokens.size == (ends[-1] if ends.size else 0)


@given(
    dtype=st.sampled_from(INTEGERS),
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=6),
)
def test_what_megatrons_builder_writes_is_read(dtype, documents):
    with new_prefix() as prefix:
        assert_holds(open_token_file(build(prefix, dtype, documents)), dtype, documents)


def test_what_megatrons_builder_merges_is_read(tmp_path):
    parts: list[list[list[list[int]]]] = [[[[1], [2, 3]], [], [[4]]], [], [[[]], [[5], [], [6]]]]
    merged = IndexedDatasetBuilder(f"{tmp_path}/merged.bin", dtype=np.int32)
    for number, documents in enumerate(parts):
        merged.add_index(str(build(tmp_path / f"{number}", "int32", documents)))
    merged.finalize(f"{tmp_path}/merged.idx")
    together = [document for documents in parts for document in documents]
    assert_holds(open_token_file(tmp_path / "merged"), "int32", together)


def test_the_token_types_are_megatrons():
    integers = {kind.value: kind.name for kind in DType if not kind.name.startswith("float")}
    assert integers == indexed._TOKEN_TYPES
    assert sorted(INTEGERS) == sorted(integers.values())


def test_megatrons_floating_point_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.idx .*: its token type is 7, none of the integers 1 "):
        open_token_file(build(tmp_path / "a", "float32", [[[1, 2]]]))


def test_tokens_of_a_sequence_are_those_of_megatrons_reader(tmp_path):
    prefix = write(tmp_path / "a")
    ours, theirs = open_token_file(prefix), IndexedDataset(str(prefix))
    for sequence, length in enumerate(LENGTHS):
        for offset in range(length + 1):
            for count in (None, *range(length - offset + 1)):
                found = ours.get(sequence, offset, count)
                assert found.tolist() == theirs.get(sequence, offset, count).tolist()
    for wrong in [(4, 0, None), (-1, 0, None), (0, 4, None), (0, 1, 3), (0, -1, 1), (0, 2, -1)]:
        with pytest.raises(IndexError):
            ours.get(*wrong)


def test_nothing_of_an_open_file_can_be_written(tmp_path):
    file = open_token_file(write(tmp_path / "a"))
    for array in (file.tokens[:], file.lengths, file.pointers, file.document_boundaries):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


# Damage: what is done to the bytes of one of the files.
Damage = tuple[str, Callable[[bytes], bytes]]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    suffix = draw(st.sampled_from([".idx", ".idx", ".bin"]))
    kinds = ["cut", "append"] + (["flip", "overwrite", "remove"] if suffix == ".idx" else [])
    kind, place = draw(st.sampled_from(kinds)), draw(st.integers(0, 150))
    block = draw(st.binary(min_size=1, max_size=24))

    def damage(content: bytes) -> bytes:
        at = place % len(content)
        if kind == "flip":
            return content[:at] + bytes([content[at] ^ (block[0] or 1)]) + content[at + 1 :]
        if kind == "overwrite":
            return (content[:at] + block + content[at + len(block) :])[: len(content)]
        if kind == "remove":
            return content[:at] + content[at + len(block) :]
        return content[:at] if kind == "cut" else content + block

    return suffix, damage


def refuses(prefix: Path, expected: ExpectedTokens | None) -> bool:
    """Whether opening ends in one line that names a file; anything else it raises goes through."""
    try:
        open_token_file(prefix, expected)
    except UserError as error:
        message = str(error)
    else:
        return False
    assert "\n" not in message
    assert f"{prefix}." in message
    assert "; " in message  # what to do comes last
    return True


def apply(damage: Damage, prefix: Path) -> None:
    suffix, change = damage
    before = path_of(prefix, suffix).read_bytes()
    after = change(before)
    assume(after != before)
    path_of(prefix, suffix).write_bytes(after)


@given(damage=damages())
def test_no_damage_passes_for_what_is_expected(damage):
    with new_prefix() as prefix:
        apply(damage, write(prefix))
        assert refuses(prefix, EXPECTED)


@given(damage=damages())
def test_damage_that_passes_unasked_changes_no_token(damage):
    """It may tell documents apart elsewhere, or the sign of tokens: then some are negative."""
    with new_prefix() as prefix:
        apply(damage, write(prefix))
        if refuses(prefix, None):
            return
        file = open_token_file(prefix)
        assert (file.tokens[:] < 0).any() or sequences(file) == DOCUMENTS


@pytest.mark.parametrize("expected", [EXPECTED, None], ids=["expected", "unknown"])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_anywhere_is_refused(tmp_path, suffix, expected):
    prefix = write(tmp_path / "a")
    content = path_of(prefix, suffix).read_bytes()
    for size in range(len(content)):
        path_of(prefix, suffix).write_bytes(content[:size])
        assert refuses(prefix, expected), size


def test_every_flipped_byte_of_an_index_is_told(tmp_path):
    prefix = write(tmp_path / "a")
    content = path_of(prefix, ".idx").read_bytes()
    for place in range(len(content)):
        for bits in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= bits
            path_of(prefix, ".idx").write_bytes(damaged)
            assert refuses(prefix, EXPECTED), (place, bits)


ALL_ONES = b"\xff" * 8
AT_COUNTS, AT_LENGTHS = 18, HEADER_BYTES
AT_POINTERS = AT_LENGTHS + 4 * len(DOCUMENTS)
AT_BOUNDARIES = AT_POINTERS + 8 * len(DOCUMENTS)
DAMAGES = {
    "magic": (0, b"XX"),
    "version": (9, b"\x07"),
    "type": (17, b"\x63"),
    "all sequences": (AT_COUNTS, ALL_ONES),
    "half of them": (AT_COUNTS + 7, b"\x80"),
    "all boundaries": (AT_COUNTS + 8, ALL_ONES),
    # 2 sequences take as much room as 3 boundaries.
    "others in their room": (AT_COUNTS, struct.pack("<QQ", 6, 2)),
    "no boundaries": (AT_COUNTS, struct.pack("<QQ", 4, 0)),
    "length below 0": (AT_LENGTHS + 8, b"\xfe\xff\xff\xff"),
    "a length": (AT_LENGTHS, b"\x04"),
    "last length": (AT_LENGTHS + 12, b"\x02"),
    "longest length": (AT_LENGTHS + 12, b"\xff\xff\xff\x7f"),
    "pointer": (AT_POINTERS + 8, b"\x07"),
    "pointer below 0": (AT_POINTERS, ALL_ONES),
    "far pointer": (AT_POINTERS + 31, b"\x7f"),
    "first boundary": (AT_BOUNDARIES, b"\x01"),
    "last boundary": (AT_BOUNDARIES + 32, b"\x05"),
    "boundary that falls": (AT_BOUNDARIES + 8, b"\x03"),
}


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 15])  # sequences checked at a time
@pytest.mark.parametrize(("place", "bytes_"), DAMAGES.values(), ids=DAMAGES)
def test_damage_to_the_index_is_rejected(tmp_path, monkeypatch, block, place, bytes_):
    monkeypatch.setattr(indexed, "_CHECK_BLOCK", block)
    prefix = write(tmp_path / "a")
    content = bytearray(path_of(prefix, ".idx").read_bytes())
    content[place : place + len(bytes_)] = bytes_
    path_of(prefix, ".idx").write_bytes(content)
    assert refuses(prefix, None)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_whole_files_are_read_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(indexed, "_CHECK_BLOCK", block)
    assert sequences(open_token_file(write(tmp_path / "a"), EXPECTED)) == DOCUMENTS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "int32"}, "its token type is uint16, not int32"),
        ({"documents": 5}, "its number of sequences is 4, not 5"),
        ({"tokens": 10}, "its number of tokens is 9, not 10"),
    ],
)
def test_files_that_are_not_those_expected_are_refused(tmp_path, change, problem):
    prefix = write(tmp_path / "a")
    expected = dataclasses.replace(EXPECTED, **change)
    with pytest.raises(UserError, match=rf"a\.idx does not match corpus.json: {problem}; "):
        open_token_file(prefix, expected)


def test_a_corpus_has_one_sequence_a_document(tmp_path):
    prefix = build(tmp_path / "a", "uint16", [[[1], [2]], []])
    assert sequences(open_token_file(prefix)) == [[1], [2]]
    with pytest.raises(UserError, match="document boundary 1 is 2 after 0, which is not 1 more"):
        open_token_file(prefix, ExpectedTokens("uint16", 2, 2))


def no_file(path: Path) -> None:
    """Leave nothing there."""


KINDS = {
    "missing": (no_file, r"is missing; .*without suffix"),
    "a folder": (Path.mkdir, r"cannot read .*: Not a regular file; "),
    "a pipe": (os.mkfifo, r"cannot read .*: Not a regular file; "),
    "a device": (lambda path: path.symlink_to("/dev/zero"), r"cannot read .*: Not a regular file"),
    "a loop": (lambda path: path.symlink_to(path), r"cannot read .*: Too many levels of symbolic"),
}


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize(("make", "problem"), KINDS.values(), ids=KINDS)
def test_what_is_no_file_is_refused_at_once(tmp_path, suffix, make, problem):
    path = path_of(write(tmp_path / "a"), suffix)
    path.unlink()
    make(path)
    with pytest.raises(UserError, match=problem) as raised:
        open_token_file(tmp_path / "a")
    assert str(path) in str(raised.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_small_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("opener", [open_tokens, open_split])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_split_is_refused_before_megatron_opens_it(corpus, opener):
    path = path_of(corpus.prefix("news", "train"), ".idx")
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"news\.idx is damaged.*pointer 1 is .*preprocess again"):
        opener(Corpus.load(corpus.root), "news", "train")


@pytest.mark.parametrize("opener", [open_tokens, open_split])
def test_another_split_in_its_place_is_refused(corpus, opener):
    for suffix in (".bin", ".idx"):
        source = path_of(corpus.prefix("news", "valid"), suffix)
        source.replace(path_of(corpus.prefix("news", "train"), suffix))
    with pytest.raises(UserError, match="number of sequences is 4, not 60"):
        opener(corpus, "news", "train")


def test_a_split_without_tokens_opens_but_not_for_megatron(corpus):
    for suffix in (".bin", ".idx"):
        path_of(corpus.prefix("news", "test"), suffix).unlink()
    write(corpus.prefix("news", "test"), [])
    empty = dataclasses.replace(
        corpus.domains["news"].test, documents=0, tokens=0, block_checksums=None
    )
    news = dataclasses.replace(corpus.domains["news"], test=empty)
    corpus = dataclasses.replace(corpus, domains={"news": news})
    file = open_tokens(corpus, "news", "test")
    assert len(file) == file.tokens.size == file.starts.size == 0
    assert file.dtype == np.uint16
    with pytest.raises(UserError, match="holds no tokens: domain 'news' has none in test; "):
        open_split(corpus, "news", "test")
