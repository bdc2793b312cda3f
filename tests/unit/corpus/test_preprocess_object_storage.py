"""Text from object storage: the same corpus as from local files, and faults of the storage."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus.options import (
    DomainOptions,
    EncoderOptions,
    PreprocessOptions,
    TrainTokenizerOptions,
)
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.corpus.train_tokenizer import train_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.conftest import some_texts
from tests.unit.corpus.corpus_making import assert_same_tokens, make_corpus, source_options


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text in every format, with a malformed line and files that are not read."""
    root = tmp_path / "text"
    (root / "deep" / ".hidden").mkdir(parents=True)
    (root / "a.jsonl").write_bytes(lines_of(some_texts(300, 1)) + b"not JSON\n")
    (root / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(some_texts(40, 2))))
    (root / "deep" / "c.jsonl.zst").write_bytes(zstandard.compress(lines_of(some_texts(40, 3))))
    pq.write_table(pa.table({"text": some_texts(60, 4)}), root / "deep" / "d.parquet", 20)
    (root / "deep" / ".hidden" / "e.jsonl").write_bytes(lines_of(["hidden"]))
    (root / "notes.csv").write_text("not read")
    return root


@pytest.fixture
def options(preprocessing):
    """``options(output, *inputs, **changes)``: several shards in this process."""

    def make(output: str, *inputs: object, **changes: Any) -> PreprocessOptions:
        settings = {"shard_bytes": 9_000, "encoding": EncoderOptions(encoder="own"), **changes}
        made: PreprocessOptions = preprocessing(*inputs, output=output, **settings)
        source = dataclasses.replace(made.source, max_malformed_share=0.1)
        return dataclasses.replace(made, source=source)

    return make


def test_a_corpus_from_s3_equals_that_of_local_files(folder, options, object_store):
    """Reads that fail twice are repeated."""
    url = object_store.put(folder, "text")
    object_store.fail("a.jsonl bytes=", "truncated", times=2)
    object_store.fail("d.parquet bytes=", "truncated", times=2)
    object_store.fail("b.jsonl.gz bytes=", "unavailable", times=2)
    inputs = (f"web={folder}", f"code={folder}/deep/*.jsonl.*")
    domains = DomainOptions(valid_input=((f"code={folder}/a.jsonl",),))
    with pytest.warns(UserWarning, match="malformed"):
        local = make_corpus(options("local", *inputs, domains=domains))
    remote_inputs = [text.replace(str(folder), url) for text in inputs]
    remote_domains = DomainOptions(valid_input=((f"code={url}/a.jsonl",),))
    changes = {"workers": 2, "domains": remote_domains}
    with pytest.warns(UserWarning, match="malformed") as warned:
        remote = make_corpus(options("remote", *remote_inputs, **changes))
    assert [times for _, times in object_store.faults.values()] == [0, 0, 0]
    assert any(f"{url}/a.jsonl:byte " in str(warning.message) for warning in warned)
    assert_same_tokens(remote, local)
    recorded = json.loads((remote.root / "sources.json").read_text())["sources"]
    names = {re.sub("^(web|code)=", "", source["name"]) for source in recorded}
    assert names == {
        f"{url}/{name}"
        for name in ("a.jsonl", "deep/b.jsonl.gz", "deep/c.jsonl.zst", "deep/d.parquet")
    }


def test_credentials_in_urls_are_not_stored_and_may_change(folder, options, object_store):
    object_store.put(folder, "text")
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    inputs = [f"web=http://user:{word}@{address}/data/text/a.jsonl" for word in ("SECRET", "NEW")]
    preprocess_data(options("remote", inputs[0], shard="1/2"))
    stored = [path for path in (folder.parent / "remote").rglob("*") if path.is_file()]
    assert len(stored) > 5
    assert not [path for path in stored if b"SECRET" in path.read_bytes()]
    with pytest.warns(UserWarning, match="malformed"):
        remote = make_corpus(options("remote", inputs[1]))
    with pytest.warns(UserWarning, match="malformed"):
        assert_same_tokens(remote, make_corpus(options("local", f"web={folder}/a.jsonl")))
    stored = [path for path in remote.root.rglob("*") if path.is_file()]
    assert not [path for path in stored if b"NEW@" in path.read_bytes()]


def test_a_read_that_keeps_failing_keeps_finished_shards(folder, options, object_store):
    url = object_store.put(folder, "text")
    object_store.fail("c.jsonl.zst bytes=", "truncated")
    remote = options("remote", f"web={url}")
    with pytest.raises(UserError, match=re.escape(f"cannot read {url}/deep/c.jsonl.zst")) as error:
        preprocess_data(remote)
    assert "\n" not in str(error.value)
    assert not (remote.output / Corpus.FILE_NAME).exists()
    finished = sorted((remote.output / ".partial" / "shards").iterdir())
    assert finished
    assert not (remote.output / ".partial" / "staging").exists()

    object_store.faults.clear()
    object_store.requests.clear()
    with pytest.warns(UserWarning, match="malformed"):
        resumed = make_corpus(remote)
    assert not any("a.jsonl bytes=" in request for request in object_store.requests)
    with pytest.warns(UserWarning, match="malformed"):
        assert_same_tokens(resumed, make_corpus(options("local", f"web={folder}")))


@pytest.mark.parametrize("content", ["deleted", "replaced"])
def test_an_object_that_changes_after_it_was_listed(content, folder, object_store):
    url = object_store.put(folder, "text")
    source = source_options(f"{url}/a.jsonl")
    found = find_sources(source)
    if content == "deleted":
        object_store.system.rm(f"{url}/a.jsonl")
    else:
        changed = (folder / "a.jsonl").read_bytes().replace(b"a", b"b")
        object_store.system.pipe(f"{url}/a.jsonl", changed)
    with pytest.raises(UserError, match="no such file" if content == "deleted" else "written to"):
        list(DocumentReader(source, found).read(Chunk(0)))


def test_resuming_compares_the_contents_of_objects(folder, options, object_store):
    url = object_store.put(folder, "text")
    remote = options("remote", f"web={url}/a.jsonl")
    preprocess_data(dataclasses.replace(remote, shard="1/2"))
    content = (folder / "a.jsonl").read_bytes()
    object_store.system.pipe(f"{url}/a.jsonl", content.replace(b"a", b"b"))
    with pytest.raises(UserError, match="has changed since it was read"):
        preprocess_data(remote)
    object_store.system.pipe(f"{url}/a.jsonl", content)
    with pytest.warns(UserWarning, match="malformed"):
        preprocess_data(remote)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://data/missing.jsonl", "no match"),
        ("s3://data/denied/a.jsonl", "cannot read s3://data/denied"),
        ("s3://data/text/notes.csv", "unsupported format"),
        ("nonsense://data/text", "nonsense"),
    ],
)
def test_unreadable_addresses(address, problem, folder, options, object_store):
    object_store.put(folder, "text")
    object_store.put(folder, "denied")
    object_store.fail("/data/denied/", "denied")
    with pytest.raises(UserError, match=problem) as error:
        preprocess_data(options("corpus", f"web={address}"))
    assert "\n" not in str(error.value)
    assert not options("corpus", "web=x").output.exists()


def test_a_tokenizer_is_trained_on_any_file_system_of_fsspec(folder, tmp_path):
    fsspec.filesystem("memory").put(str(folder), "/text", recursive=True)
    made = []
    for number, text in enumerate((str(folder), "memory:///text", f"file://{folder}")):
        source = source_options(text, max_malformed_share=0.1)
        output = tmp_path / f"{number}.json"
        with pytest.warns(UserWarning, match="malformed"):
            train_tokenizer(TrainTokenizerOptions(source, output, vocab_size=300))
        made.append(output.read_bytes())
    assert made[0] == made[1] == made[2]
