"""The output folder: plans that processes agree on, shards, locks and stale staging directories."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.corpus import staging
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.sources import Chunk, Source, find_sources
from megatron_chameleon.corpus.staging import (
    Plan,
    corpus_folder,
    divide,
    make_plan,
    staging_directory,
)
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import left_in

PLAN = Plan(
    root=Path(),
    options={"split": "90,5,5"},
    tokenizer="0" * 64,
    versions={},
    sources=[Source("a", "lines", "a", bytes=10)],
    shards=[[Chunk(0, 0, None, 10)]],
)
OTHER_PLAN = dataclasses.replace(PLAN, options={"split": "80,10,10"})


# Plans


@pytest.fixture
def options(tmp_path, jsonl, texts, tokenizer_json):
    paths = [f"a={jsonl('a.jsonl', texts(30, 1))}", f"b={jsonl('b.jsonl', texts(20, 2))}"]
    return PreprocessOptions(SourceOptions((tuple(paths),)), tmp_path / "out", tokenizer_json)


def plan_of(options):
    tokenizer = load_tokenizer(options.tokenizer_model, options.eod_token)
    return make_plan(options, tokenizer, find_sources(options.source, options.domains))


def test_plans_differ_only_where_shards_do(options, tmp_path, jsonl, texts, sentencepiece_model):
    """Each change is named; options that shards do not depend on are no difference."""
    begun = dataclasses.replace(plan_of(options), root=tmp_path / "begun")
    begun.save()
    begun = Plan.load(begun.root)

    def difference(**changes):
        return plan_of(dataclasses.replace(options, **changes)).difference(begun)

    def of_inputs(*inputs):
        return difference(source=SourceOptions((inputs,)))

    a, b = f"a={tmp_path}/a.jsonl", f"b={tmp_path}/b.jsonl"
    assert dataclasses.replace(plan_of(options), root=begun.root) == begun
    lenient = dataclasses.replace(options.source, max_malformed_share=0.5)
    assert difference() is None
    assert difference(drop_duplicates=False, min_tokens_per_split=9, workers=3) is None
    assert difference(shard="1/2", overwrite=True, source=lenient) is None
    assert of_inputs(f"a={tmp_path}/[a].jsonl", b) is None

    assert "--split is '80,10,10' and was '90,5,5'" in difference(split="80,10,10")
    assert "--shard-bytes is 1000 and was" in difference(shard_bytes=1000)
    assert "--tokenizer-model" in difference(tokenizer_model=sentencepiece_model)
    more = f"a={jsonl('more.jsonl', texts(10))}"
    assert f"{tmp_path}/more.jsonl is " in of_inputs(a, b, more)
    assert f"{tmp_path}/b.jsonl is absent" in of_inputs(a)
    assert "the order or the row groups" in of_inputs(b, a)
    assert f"{tmp_path}/b.jsonl is " in of_inputs(a, f"c={tmp_path}/b.jsonl")
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes()[:-1])
    assert f"{tmp_path}/b.jsonl is " in of_inputs(a, b)


sources_of_any_size = st.lists(
    st.builds(
        lambda size, cuttable: Source("", "lines", "", bytes=size, cuttable=cuttable),
        st.integers(0, 1000),
        st.booleans(),
    ),
    max_size=20,
)


@given(sources_of_any_size, st.integers(1, 300))
def test_shards_are_full_and_their_chunks_are_the_sources_in_order(sources, target):
    shards = divide(sources, target)
    chunks = [chunk for shard in shards for chunk in shard]
    assert [chunk.source for chunk in chunks] == sorted(chunk.source for chunk in chunks)
    for number, source in enumerate(sources):
        own = [
            (chunk.start, source.bytes if chunk.stop is None else chunk.stop)
            for chunk in chunks
            if chunk.source == number
        ]
        edges = [0, *(stop for _, stop in own)]
        assert own == list(itertools.pairwise(edges))
        assert edges[-1] == source.bytes
        assert len(own) == 1 or source.cuttable
    sizes = [sum(chunk.bytes for chunk in shard) for shard in shards]
    for shard, size in zip(shards, sizes, strict=True):
        assert size <= target or (len(shard) == 1 and not sources[shard[0].source].cuttable)
    for size, after in zip(sizes, shards[1:], strict=False):
        assert size + after[0].bytes > target


# The folder


def write(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"kind": "corpus"}' if name == "corpus.json" else name)


def write_corpus(root, names, overwrite=False):
    with corpus_folder(root, overwrite, shared=False) as folder:
        for name in [*names, "corpus.json"]:
            write(folder.staging / "corpus", name)
        folder.publish(folder.staging / "corpus")


def put_shard(folder, number):
    written = folder.staging / "shard"
    written.mkdir()
    (written / "shard.json").touch()
    folder.put_shard(written, number)


def fail(root, error, shards=0, overwrite=False):
    with corpus_folder(root, overwrite, shared=False) as folder:
        folder.agree(PLAN)
        for number in range(shards):
            put_shard(folder, number)
        write(folder.staging, "half-written")
        raise error


@pytest.mark.parametrize("name", ["tokenizer.json", "tokens/a-train.bin", "discovered.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_other_origin_are_not_replaced(tmp_path, name, overwrite):
    write(tmp_path, name)
    with pytest.raises(UserError, match=name):
        write_corpus(tmp_path, ["tokenizer.json"], overwrite)
    assert left_in(tmp_path) == [name]


def test_a_corpus_is_replaced_only_with_overwrite(tmp_path):
    old = ["tokens/a-train.bin", "tokens/old-train.idx", "tokenizer.model", "sources.json"]
    old += ["discovered.json", "discovered.safetensors"]
    write_corpus(tmp_path, [*old, "tokenizer.tiktoken"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="--overwrite"):
        write_corpus(tmp_path, ["tokens/a-train.bin"])
    before = left_in(tmp_path)
    for shards in (0, 1):
        with pytest.raises(RuntimeError):
            fail(tmp_path, RuntimeError, shards, overwrite=True)
        assert [name for name in left_in(tmp_path) if ".partial" not in name] == before
        assert (tmp_path / ".partial").exists() == (shards > 0)
    write_corpus(tmp_path, ["tokens/a-train.bin", "tokenizer.json"], overwrite=True)
    assert left_in(tmp_path) == ["corpus.json", "notes.txt", "tokenizer.json", "tokens/a-train.bin"]


@pytest.mark.parametrize("links", [True, False])
def test_another_plan_is_rejected_while_work_by_the_first_exists(tmp_path, monkeypatch, links):
    def reject(source, target):
        raise PermissionError(1, "no hard links here", source)

    if not links:
        monkeypatch.setattr(os, "link", reject)
    with corpus_folder(tmp_path, overwrite=False, shared=True) as first:
        first.agree(PLAN)
        with corpus_folder(tmp_path, overwrite=False, shared=True) as second:
            with pytest.raises(UserError, match="--split"):
                second.agree(OTHER_PLAN)
            assert second.agree(PLAN).options == PLAN.options
        assert first.agree(OTHER_PLAN).options == OTHER_PLAN.options
        put_shard(first, 0)
        with pytest.raises(UserError, match="--split is '90,5,5' and was '80,10,10'"):
            first.agree(PLAN)
        assert Plan.load(first.partial).options == OTHER_PLAN.options


def test_a_folder_has_one_writer_unless_it_is_shared(tmp_path):
    def enter(shared):
        with corpus_folder(tmp_path, overwrite=False, shared=shared):
            pass

    with corpus_folder(tmp_path, overwrite=False, shared=False) as folder:
        write(folder.staging, "half-written")
        for shared in (False, True):
            with pytest.raises(UserError, match="another process"):
                enter(shared)
        assert (folder.staging / "half-written").exists()
    with corpus_folder(tmp_path, overwrite=False, shared=True):
        enter(shared=True)
        with pytest.raises(UserError, match="another process"):
            enter(shared=False)


def test_staging_directories_do_not_collide(tmp_path, monkeypatch):
    try_lock = staging._try_lock

    def slow_lock(descriptor, kind):
        time.sleep(0.001)
        return try_lock(descriptor, kind)

    monkeypatch.setattr(staging, "_try_lock", slow_lock)

    def enter_and_leave(number):
        for _ in range(20):
            with staging_directory(tmp_path / "staging") as directory:
                (directory / "mine").write_text(f"{number}")
                time.sleep(0.0005)
                assert (directory / "mine").read_text() == f"{number}"
            with contextlib.suppress(OSError):
                (tmp_path / "staging").rmdir()
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(enter_and_leave, range(8))) == list(range(8))
    assert not left_in(tmp_path)


def test_only_stale_directories_of_this_machine_are_removed(tmp_path):
    code = (
        "import os, sys, pathlib\n"
        "from megatron_chameleon.corpus.staging import staging_directory\n"
        "with staging_directory(pathlib.Path(sys.argv[1])) as directory:\n"
        "    (directory / 'half-written').touch()\n"
        "    print(directory, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    assert (Path(killed.stdout.strip()) / "half-written").exists()
    (tmp_path / "elsewhere-abc").mkdir()  # of another machine, which may be at work
    with staging_directory(tmp_path) as first, staging_directory(tmp_path) as second:
        assert set(tmp_path.iterdir()) == {first, second, tmp_path / "elsewhere-abc"}
    assert set(tmp_path.iterdir()) == {tmp_path / "elsewhere-abc"}
