"""Tokens in object storage: the same samples as from local files, the local copy, and faults."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Corpus, TokenizerIdentity
from megatron_chameleon.blend import BlendedTokens, MixtureSchedule
from megatron_chameleon.corpus import indexed
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import Domains, open_data_path, open_domains
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.indexed import open_token_file
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.errors import UserError
from tests.small_corpus import EOD, VOCAB_SIZE, word_tokenizer
from tests.unit.corpus.test_indexed import build

SPLIT, WEIGHTS = "80,12,8", (0.3, 0.6, 0.1)
# File name -> type and number of documents; "small" has less than a chunk.
FILES = {"web": (np.uint16, 2000), "code": (np.int32, 1000), "small": (np.uint16, 100)}
CHUNK = 1 << 15
TOKENIZER = TokenizerIdentity("tokenizers", "tokenizer.json", "5" * 64, VOCAB_SIZE, EOD)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with files of Megatron's builder; documents of "code" have two sequences."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(3)
    for name, (dtype, count) in FILES.items():
        texts = (np.append(rng.integers(0, EOD, rng.integers(4, 200)), EOD) for _ in range(count))
        sequences = 2 if name == "code" else 1
        build(folder / name, dtype, (np.array_split(text, sequences) for text in texts))
    return folder


@pytest.fixture
def url(files, object_store, monkeypatch, tmp_path) -> str:
    """The URL of a copy of the files in object storage, with small chunks."""
    monkeypatch.setattr(indexed, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    folder = object_store.put(files, "tokens")
    object_store.requests.clear()
    return folder


def data_path(folder: object) -> DataPath:
    pairs = zip(WEIGHTS, FILES, strict=True)
    return DataPath.parse(" ".join(f"{weight} {folder}/{name}" for weight, name in pairs))


def samples_of(data: Domains) -> NDArray[np.int64]:
    schedule = MixtureSchedule.fixed(list(WEIGHTS))
    batch = BlendedTokens(data, schedule, 300, 64, 5, "epoch").batch(range(300))
    found: NDArray[np.int64] = torch.cat([batch["tokens"], batch["labels"]]).numpy()
    return found


def test_samples_equal_those_of_local_files(files, url, tmp_path):
    for split in SPLITS:
        local = open_data_path(data_path(files), SPLIT, TOKENIZER).of(split)
        remote = open_data_path(data_path(url), SPLIT, TOKENIZER, tmp_path / "cache").of(split)
        assert (remote.hash, remote.names) == (local.hash, local.names)
        assert np.array_equal(samples_of(remote), samples_of(local))
    assert not (tmp_path / "default").exists()


def test_samples_of_a_file_system_that_reads_one_range_at_a_time(files, tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_CHUNK_BYTES", CHUNK)
    system = fsspec.filesystem("memory")
    for path in files.iterdir():
        system.pipe(f"/tokens/{path.name}", path.read_bytes())
    local = open_data_path(data_path(files), SPLIT, TOKENIZER)
    remote = open_data_path(data_path("memory://tokens"), SPLIT, TOKENIZER, tmp_path / "cache")
    assert np.array_equal(samples_of(remote), samples_of(local))
    system.rm("/tokens", recursive=True)


def test_sequences_equal_those_of_megatrons_reader(url, tmp_path):
    storage = ObjectStorageConfig(str(tmp_path / "index"), bin_chunk_nbytes=CHUNK)
    for name in FILES:
        theirs = IndexedDataset(f"{url}/{name}", mmap=False, object_storage_config=storage)
        ours = open_token_file(f"{url}/{name}")
        assert len(ours) == len(theirs)
        for number in np.random.default_rng(1).permutation(len(ours))[:200].tolist():
            assert np.array_equal(ours.get(number), theirs[number])
        documents = ours.documents(3, 40)
        begin = int(ours.starts[3])
        assert np.array_equal(documents.tokens[5:300], ours.tokens[begin + 5 : begin + 300])


def chunk_requests(object_store) -> list[str]:
    return [request for request in object_store.requests if ".bin bytes=" in request]


def test_only_missing_chunks_are_requested(files, url, object_store, tmp_path):
    def read(*ranges: tuple[int, int]) -> list[str]:
        object_store.requests.clear()
        file = open_token_file(f"{url}/web", cache=tmp_path)
        for start, stop in ranges:
            assert np.array_equal(file.tokens[start:stop], tokens[start:stop])
        return chunk_requests(object_store)

    tokens = np.fromfile(files / "web.bin", np.uint16)
    per_chunk = CHUNK // 2
    assert len(read((10, 20), (per_chunk - 5, per_chunk + 5))) == 2
    assert len(read((0, 2 * per_chunk))) == 0
    assert not any(".idx" in request and "GET" in request for request in object_store.requests)
    assert len(read((0, len(tokens)))) == -(-len(tokens) // per_chunk) - 2
    (copy,) = tmp_path.glob("*.bin")
    assert copy.read_bytes()[: tokens.nbytes] == tokens.tobytes()
    indexed.write_at(copy, CHUNK + 7, b"damaged")
    assert len(read((0, len(tokens)))) == 1

    # An object with other content and equal size gets another copy.
    tokens, opened = tokens[::-1].copy(), open_token_file(f"{url}/web", cache=tmp_path / "other")
    object_store.system.pipe(f"{url}/web.bin", tokens.tobytes())
    with pytest.raises(UserError, match=r"web\.bin has changed"):
        opened.tokens[:]
    assert len(read((0, len(tokens)))) == -(-len(tokens) // per_chunk)


def test_open_files_share_the_chunks_that_they_read(url, object_store, tmp_path):
    files = [open_token_file(f"{url}/web", cache=tmp_path) for _ in range(2)]
    first = files[0].tokens[:]
    object_store.requests.clear()
    assert np.array_equal(files[1].tokens[:], first)
    assert not object_store.requests


def test_the_rest_of_a_killed_download_is_removed(url, tmp_path):
    open_token_file(f"{url}/small", cache=tmp_path)
    (index,) = tmp_path.glob("*-small.idx")
    index.rename(tmp_path / f".{index.name[:40]}.0123456789ab.tmp")
    open_token_file(f"{url}/small", cache=tmp_path)
    assert index.exists()
    assert not list(tmp_path.glob(".*"))


def test_reads_that_fail_twice_succeed(files, url, object_store):
    object_store.fail("web.idx bytes=", "truncated", times=2)
    object_store.fail("web.bin bytes=", "truncated", times=2)
    file = open_token_file(f"{url}/web")
    assert np.array_equal(file.tokens[:], np.fromfile(files / "web.bin", np.uint16))
    assert [times for _, times in object_store.faults.values()] == [0, 0]


@pytest.mark.parametrize(
    ("text", "fault", "problem"),
    [
        ("web.bin", "deleted", "web.bin: no such file"),
        ("web.idx", "deleted", "web.idx: no such file"),
        ("/data/", "denied", "cannot read s3://data/tokens/web"),
        ("web.bin bytes=", "truncated", "cannot read s3://data/tokens/web.bin"),
        ("web.idx bytes=", "truncated", "cannot read s3://data/tokens/web.idx"),
    ],
)
def test_tokens_that_cannot_be_read(text, fault, problem, url, object_store, tmp_path):
    if fault == "deleted":
        object_store.system.rm(f"{url}/{text}")
    else:
        object_store.fail(text, fault)
    with pytest.raises(UserError, match=problem) as error:
        open_token_file(f"{url}/web", cache=tmp_path).tokens[:]
    assert "\n" not in str(error.value)
    if fault == "truncated":  # repeating these requests takes seconds
        return
    output, tokenizer = tmp_path / "corpus", word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=re.escape(url)):
        import_corpus(ImportOptions(output, tokenizer, f"{url}/small {url}/web"))
    assert not output.exists()


def test_an_imported_corpus_reads_object_storage(files, url, object_store, tmp_path):
    tokenizer, corpora = word_tokenizer(tmp_path / "tokenizer.json"), list[Corpus]()
    for folder in (files, url):
        output = tmp_path / f"corpus{len(corpora)}"
        prefixes = " ".join(f"{folder}/{name}" for name in FILES)
        import_corpus(ImportOptions(output, tokenizer, prefixes, split=SPLIT))
        corpora.append(Corpus.load(output))
    local, remote = corpora
    remote.verify()
    assert remote.hash == local.hash
    assert remote.prefix("web", "train") == f"{url}/web"
    for name in FILES:
        for split in SPLITS:
            one, other = (open_domains(each).open(name, split) for each in (remote, local))
            assert np.array_equal(one.tokens[:], other.tokens[:])
            assert np.array_equal(one.lengths, other.lengths)
    first, second = (samples_of(open_domains(corpus)) for corpus in corpora)
    assert np.array_equal(first, second)

    object_store.system.rm(f"{url}/code.bin")
    with pytest.raises(UserError, match=r"code\.bin: no such file"):
        Corpus.load(remote.root)
