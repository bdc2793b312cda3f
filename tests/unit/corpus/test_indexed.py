"""Token files are byte-identical to Megatron's, and blocks are verified when they are read."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_chameleon.artifacts import Corpus, DomainSplit
from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.blend import BlendedTokens, MixtureSchedule
from megatron_chameleon.corpus import indexed
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.indexed import (
    TYPE_CODES,
    IndexedWriter,
    map_file,
    open_token_file,
    token_type,
)
from megatron_chameleon.errors import UserError
from tests.small_corpus import without_checksums, write_small_corpus

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16")
DOCUMENTS = [[7, 40_000, 9], [], [1, 2, 65_499, 4, 5], [6]]
RECORDED = DomainSplit("a", len(DOCUMENTS), sum(map(len, DOCUMENTS)), None, "0" * 64)


def write(prefix):
    writer = IndexedWriter(prefix, "uint16")
    for document in DOCUMENTS:
        writer.add(np.array(document, dtype=np.int64))
    writer.finish()
    return prefix


def sequences(file):
    return [file.get(i).tolist() for i in range(len(file))]


def build(prefix, dtype, documents):
    """Write documents of several sequences as Megatron does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


# Writing


# The small buffer is flushed after each document, the large buffer only at the end.
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
@pytest.mark.parametrize("count", [0, 300])
@pytest.mark.parametrize("vocab_size", [400, 65_500])
def test_files_are_identical_to_those_of_megatrons_builder(
    tmp_path, monkeypatch, buffer_bytes, count, vocab_size
):
    monkeypatch.setattr(indexed, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(indexed, "_INDEX_BLOCK", 7)
    rng, dtype = np.random.default_rng(count), token_type(vocab_size)
    documents = [rng.integers(0, vocab_size, rng.integers(1, 60)) for _ in range(count)]
    build(tmp_path / "theirs", dtype, [[document.tolist()] for document in documents])
    writer = IndexedWriter(tmp_path / "ours", dtype)
    for document in documents[:9]:
        writer.add(document)
    writer.add_lengths(np.array([document.size for document in documents[9:]], dtype=np.int32))
    for document in documents[9:]:
        writer.add_tokens(document.astype(dtype).data)
    digest = writer.finish()
    ours, theirs = (
        [(tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
        for name in ("ours", "theirs")
    )
    assert ours == theirs
    assert digest == hashlib.sha256(b"".join(theirs)).hexdigest()
    assert (writer.documents, writer.tokens) == (count, sum(map(len, documents)))


def test_token_types_are_megatrons():
    integers = {kind.value: kind.name for kind in DType if not kind.name.startswith("float")}
    assert integers == indexed._TOKEN_TYPES
    assert sorted(INTEGERS) == sorted(integers.values())
    for name, code in TYPE_CODES.items():
        assert code == DType.code_from_dtype(np.dtype(name).type)
    for vocab_size in (1, 65_499, 65_500, 65_501, 250_000):
        assert token_type(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size)).name


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_full_disk_is_a_user_error_and_an_existing_file_is_kept(tmp_path, suffix):
    writer = IndexedWriter(tmp_path / "a", "uint16")
    (tmp_path / f"a{suffix}").unlink()
    (tmp_path / f"a{suffix}").symlink_to("/dev/full")
    writer.add(np.arange(10))
    with pytest.raises(UserError, match=f"a{suffix}"):
        writer.finish()
    (tmp_path / f"b{suffix}").write_bytes(b"precious")
    with pytest.raises(UserError, match=f"b{suffix}"):
        IndexedWriter(tmp_path / "b", "uint16")
    assert (tmp_path / f"b{suffix}").read_bytes() == b"precious"


# Reading


@given(
    dtype=st.sampled_from(INTEGERS),
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=6),
)
def test_files_of_megatrons_builder_are_read(dtype, documents):
    with tempfile.TemporaryDirectory() as folder:
        file = open_token_file(build(Path(folder) / "a.b", dtype, documents))
        assert sequences(file) == [sequence for document in documents for sequence in document]
        assert np.diff(file.document_boundaries).tolist() == [len(d) for d in documents]
        assert file.dtype == np.dtype(dtype)
        ends = np.cumsum(file.lengths, dtype=np.int64)
        assert file.starts.tolist() == (ends - file.lengths).tolist()
        assert file.tokens.size == (ends[-1] if ends.size else 0)


def is_rejected(prefix, recorded):
    """Whether opening the files raises a one-line UserError that names a file."""
    try:
        open_token_file(prefix, "uint16", recorded)
    except UserError as error:
        return f"{prefix}." in str(error) and "\n" not in str(error)
    return False


@given(
    suffix=st.sampled_from([".idx", ".idx", ".bin"]),
    kind=st.sampled_from(["cut", "append", "flip", "overwrite", "remove"]),
    place=st.integers(0, 150),
    block=st.binary(min_size=1, max_size=24),
)
def test_damage_is_found_or_changes_no_token(suffix, kind, place, block):
    """Without recorded contents, changed boundaries or negative tokens may remain undetected."""
    assume(suffix == ".idx" or kind in ("cut", "append"))
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder) / "a.b")
        path = Path(f"{prefix}{suffix}")
        content = path.read_bytes()
        at = place % len(content)
        damaged = {
            "cut": content[:at],
            "append": content + block,
            "flip": content[:at] + bytes([content[at] ^ (block[0] or 1)]) + content[at + 1 :],
            "overwrite": (content[:at] + block + content[at + len(block) :])[: len(content)],
            "remove": content[:at] + content[at + len(block) :],
        }[kind]
        assume(damaged != content)
        path.write_bytes(damaged)
        assert is_rejected(prefix, RECORDED)
        if not is_rejected(prefix, None):
            file = open_token_file(prefix)
            assert (file.tokens[:] < 0).any() or sequences(file) == DOCUMENTS


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_files_pipes_and_devices_are_rejected(tmp_path, suffix):
    path = Path(f"{write(tmp_path / 'a')}{suffix}")
    for make in (lambda path: None, os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink()
        make(path)
        with pytest.raises(UserError, match=rf"a\{suffix}"):
            open_token_file(tmp_path / "a")
        path.touch()


# Blocks and their checksums


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def file_of(corpus, suffix):
    return Path(f"{corpus.prefix('news', 'train')}{suffix}")


@pytest.fixture
def corpus(tmp_path):
    """Three domains whose training text fills several blocks."""

    def document(number, rng):
        return rng.integers(0, 250, int(rng.integers(500, 2000)))

    return write_small_corpus(tmp_path / "corpus", document=document)


def test_a_flipped_bit_is_found_when_its_block_is_read(corpus):
    path, size = file_of(corpus, ".bin"), BLOCK_BYTES // 2
    data = open_domains(corpus)
    flip(path, 8 * (2 * BLOCK_BYTES + 5))
    tokens = open_domains(corpus).open("news", "train").tokens
    assert tokens.size > 3 * size
    tokens[: 2 * size]
    tokens[3 * size :]
    tokens[np.array([0, 3 * size])]
    for key in (slice(2 * size, 2 * size + 1), slice(0, 2 * size + 1), np.array([0, 2 * size])):
        with pytest.raises(UserError, match=r"block 2\)"):
            tokens[key]
    schedule = MixtureSchedule.fixed([1.0, 1.0, 1.0])
    samples = BlendedTokens(data, schedule, 1000, 32, 1, "feistel")
    with pytest.raises(UserError, match=rf"{path}.*block 2\)"):
        samples.batch(range(1000))


def test_a_block_is_verified_once_and_then_returns_the_tokens_on_disk(corpus):
    on_disk = np.fromfile(file_of(corpus, ".bin"), np.uint16)
    tokens = open_domains(corpus).open("news", "train").tokens
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, stop = np.sort(rng.integers(0, on_disk.size, 2)).tolist()
        positions = rng.integers(0, on_disk.size, (3, 5))
        assert np.array_equal(tokens[first:stop], on_disk[first:stop])
        assert np.array_equal(tokens[positions], on_disk[positions])
    assert tokens[-5:].tolist() == on_disk[-5:].tolist()
    assert np.array_equal(tokens[:], on_disk)
    assert tokens.checked.all()
    with pytest.raises(IndexError):
        tokens[np.array([-1])]


@pytest.mark.parametrize("suffix", [".idx", ".xxh3"])
def test_any_flipped_bit_of_the_index_or_of_the_checksums_is_found(corpus, suffix):
    path = file_of(corpus, suffix)
    content = path.read_bytes()
    for bit in random.Random(1).sample(range(8 * len(content)), min(200, 8 * len(content))):
        flip(path, bit)
        with pytest.raises(UserError, match=path.stem):
            open_domains(corpus).open("news", "train").tokens[:]
        with pytest.raises(UserError):
            corpus.verify()
        path.write_bytes(content)


def test_checksums_are_those_of_the_files_and_may_be_absent(corpus):
    content = file_of(corpus, ".bin").read_bytes(), file_of(corpus, ".idx").read_bytes()
    expected = [
        xxhash.xxh3_64_intdigest(part[i : i + BLOCK_BYTES])
        for part in content
        for i in range(0, len(part), BLOCK_BYTES)
    ]
    assert np.fromfile(file_of(corpus, ".xxh3"), "<u8").tolist() == expected
    without_checksums(corpus)
    older = Corpus.load(corpus.root)
    assert older.hash == corpus.hash
    assert open_domains(older).open("news", "train").tokens[:].tobytes() == content[0]


def test_a_mapped_file_is_not_kept_open_and_unmapped_after_its_last_view(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes([7]) * 20_000)
    before = len(os.listdir("/proc/self/fd"))
    view = map_file(path).view(np.int8)[:1]
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) in Path("/proc/self/maps").read_text()
    assert view.tolist() == [7]
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()
