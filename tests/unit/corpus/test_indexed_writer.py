"""The files are Megatron's, to the byte, however the documents come in."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_chameleon.corpus import indexed
from megatron_chameleon.corpus.indexed import (
    HEADER,
    MAGIC,
    TYPE_CODES,
    IndexedWriter,
    token_type,
)
from megatron_chameleon.errors import UserError


def random_documents(rng, count, vocab_size):
    return [rng.integers(0, vocab_size, rng.integers(1, 60)).astype(np.int32) for _ in range(count)]


def files(prefix):
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


# Buffers that flush after each document, now and then, and once at the end.
@pytest.mark.parametrize("buffer_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("vocab_size", [400, 65_499, 65_500, 250_000])
def test_files_are_those_of_megatrons_builder(
    tmp_path, monkeypatch, buffer_bytes, count, vocab_size
):
    monkeypatch.setattr(indexed, "_BUFFER_BYTES", buffer_bytes)
    documents = random_documents(np.random.default_rng(count), count, vocab_size)

    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    for document in documents:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))

    writer = IndexedWriter(tmp_path / "ours", token_type(vocab_size))
    for document in documents:
        writer.add(document)
    digest = writer.finish()

    ours = files(tmp_path / "ours")
    assert ours == files(tmp_path / "theirs")
    assert digest == hashlib.sha256(b"".join(ours)).hexdigest()
    assert writer.documents == count
    assert writer.tokens == sum(document.size for document in documents)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_full_disk_is_told_in_one_line(tmp_path, suffix):
    writer = IndexedWriter(tmp_path / "a", "uint16")
    (tmp_path / f"a{suffix}").unlink(missing_ok=True)
    (tmp_path / f"a{suffix}").symlink_to("/dev/full")
    writer.add(np.arange(10))
    with pytest.raises(UserError, match=rf"cannot write .*a{suffix}: No space left on device"):
        writer.finish()


def test_the_format_is_told_as_megatron_tells_it():
    assert len(MAGIC) == 9
    for name, code in TYPE_CODES.items():
        assert code == DType.code_from_dtype(np.dtype(name).type)
    for vocab_size in (1, 65_499, 65_500, 65_501, 250_000):
        assert token_type(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size)).name


@pytest.mark.parametrize("blocks", [1, 4, 100])
@pytest.mark.parametrize("index_block", [1, 3, 1000])
def test_documents_can_come_in_blocks_of_any_size(tmp_path, monkeypatch, blocks, index_block):
    documents = random_documents(np.random.default_rng(2), 100, 60_000)
    one_by_one = IndexedWriter(tmp_path / "one", "uint16")
    for document in documents:
        one_by_one.add(document)
    digest = one_by_one.finish()

    monkeypatch.setattr(indexed, "_INDEX_BLOCK", index_block)
    writer = IndexedWriter(tmp_path / "blocks", "uint16")
    lengths = np.array([document.size for document in documents], dtype=np.int32)
    for part in np.array_split(np.arange(100), blocks):
        writer.add_lengths(lengths[part])
        tokens = np.concatenate([documents[i] for i in part]).astype(np.uint16)
        writer.add_tokens(tokens[:5].tobytes())
        writer.add_tokens(tokens[5:].data)
    assert writer.finish() == digest
    assert files(tmp_path / "blocks") == files(tmp_path / "one")
    assert (writer.documents, writer.tokens) == (one_by_one.documents, one_by_one.tokens)


def test_an_index_that_is_not_finished_is_no_index(tmp_path):
    writer = IndexedWriter(tmp_path / "a", "uint16")
    writer.add(np.arange(10))
    writer.flush()
    with (tmp_path / "a.idx").open("rb") as stream:
        assert stream.read(HEADER.size) == bytes(HEADER.size)


def test_no_file_stays_open(tmp_path):
    open_before = len(os.listdir("/proc/self/fd"))
    writers = [IndexedWriter(tmp_path / f"{i}", "uint16") for i in range(20)]
    for writer in writers:
        writer.add(np.arange(1000))
        writer.flush()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_file_that_is_there_is_never_written_to(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"somebody else's")
    with pytest.raises(UserError, match=r"cannot write .*a\.bin"):
        IndexedWriter(tmp_path / "a", "uint16")
    assert (tmp_path / "a.bin").read_bytes() == b"somebody else's"
