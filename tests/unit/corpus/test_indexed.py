from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus import indexed
from megatron_chameleon.corpus.indexed import IndexedWriter, open_split, token_type
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.preprocess import PreprocessOptions
from megatron_chameleon.options.source import SourceOptions


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


def test_megatrons_reader_gives_the_documents_back(tmp_path):
    documents = random_documents(np.random.default_rng(1), 100, 60_000)
    writer = IndexedWriter(tmp_path / "a", "uint16")
    for document in documents:
        writer.add(document)
    writer.finish()
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert len(dataset) == 100
    assert dataset.document_indices.tolist() == list(range(101))
    for index, document in enumerate(documents):
        np.testing.assert_array_equal(dataset[index], document)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_full_disk_is_told_in_one_line(tmp_path, suffix):
    (tmp_path / f"a{suffix}").symlink_to("/dev/full")
    writer = IndexedWriter(tmp_path / "a", "uint16")
    writer.add(np.arange(10))
    with pytest.raises(UserError, match=rf"cannot write .*a{suffix}: No space left on device"):
        writer.finish()


@pytest.fixture
def corpus(tmp_path, jsonl, texts, tokenizer_json):
    source = SourceOptions(((f"a={jsonl('a.jsonl', texts(100))}",),))
    options = PreprocessOptions(source, tmp_path / "corpus", tokenizer_json, split="50,25,25")
    preprocess_data(options)
    return Corpus.load(tmp_path / "corpus")


def index_file(corpus) -> Path:
    prefix = corpus.prefix("a", "train")
    return prefix.with_name(prefix.name + ".idx")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("cut", [1, 40])
def test_a_truncated_file_is_refused_when_the_corpus_is_loaded(corpus, suffix, cut):
    path = index_file(corpus).with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=rf"a-train{suffix} holds .* bytes .*truncated"):
        Corpus.load(corpus.root)


def test_a_missing_file_is_refused_when_the_corpus_is_loaded(corpus):
    index_file(corpus).unlink()
    with pytest.raises(UserError, match=r"a-train\.idx is missing"):
        Corpus.load(corpus.root)


def test_an_opened_split_is_what_corpus_json_says(corpus):
    dataset = open_split(corpus, "a", "valid")
    assert len(dataset) == corpus.domains["a"].valid.documents
    assert int(dataset.sequence_lengths.sum()) == corpus.domains["a"].valid.tokens


DAMAGE = {
    "magic": (0, b"XX", "kind is b'XX"),
    "version": (9, b"\x07", "version is 7"),
    "type": (17, b"\x63", "token type is 99"),
    "other type": (17, b"\x04", "token type is 4, not 8"),
    "sequences": (18, b"\xff\xff\xff\x7f", "number of documents is 21"),
    "fewer sequences": (18, b"\x01\x00", "number of documents is 1,"),
    "a length": (34, b"\xff\x7f", "it counts [0-9]+ tokens, not"),
}


@pytest.mark.parametrize(("offset", "damage", "problem"), DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_index_of_the_right_size_is_refused_when_opened(corpus, offset, damage, problem):
    path = index_file(corpus)
    content = bytearray(path.read_bytes())
    content[offset : offset + len(damage)] = damage
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a-train\.idx is not what corpus.json says: .*{problem}"):
        open_split(Corpus.load(corpus.root), "a", "train")


def test_files_of_another_corpus_are_refused_when_opened(corpus):
    source, target = corpus.prefix("a", "valid"), corpus.prefix("a", "train")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{source}{suffix}", f"{target}{suffix}")
    with pytest.raises(UserError, match="number of documents is"):
        open_split(corpus, "a", "train")
