"""The output folder: plans, shards, locks and stale staging directories."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.corpus import staging
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.sources import Chunk, Source, find_sources
from megatron_chameleon.corpus.staging import (
    ShardPlan,
    corpus_folder,
    divide,
    plan_shards,
)
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import left_in

PLAN = ShardPlan(
    root=Path(),
    options={"split": "90,5,5"},
    tokenizer="0" * 64,
    versions={},
    sources=[Source("a", "lines", "a", bytes=10)],
    shards=[[Chunk(0, 0, None, 10)]],
)
LARGER_THAN_ANY_PROCESS_ID = 1 << 30
OTHER_PLAN = dataclasses.replace(PLAN, options={"split": "80,10,10"})


# Plans


def test_plans_differ_only_in_options_that_change_shards(
    tmp_path, jsonl, texts, tokenizer_json, monkeypatch
):
    a, b = (f"{x}={jsonl(f'{x}.jsonl', texts(20, ord(x)))}" for x in "ab")
    options = PreprocessOptions(SourceOptions(((a, b),)), tmp_path / "out", tokenizer_json)
    tokenizer = load_tokenizer(tokenizer_json, options.eod_token)

    def plan(inputs, **changes):
        source = SourceOptions((inputs,), max_malformed_share=0.5)
        changed = dataclasses.replace(options, source=source, **changes)
        return plan_shards(changed, tokenizer, find_sources(changed.source, changed.domains))

    dataclasses.replace(plan((a, b)), root=tmp_path).save()
    begun = ShardPlan.load(tmp_path)
    assert dataclasses.replace(plan((a, b)), root=tmp_path) == begun
    unrelated = plan((f"a={tmp_path}/[a].jsonl", b), drop_duplicates=False, workers=3, shard="1/2")
    assert unrelated.difference(begun) is None
    for changed, named in (
        (plan((a, b), split="80,10,10"), "--split is '80,10,10' and was '90,5,5'"),
        (dataclasses.replace(begun, tokenizer="0"), "--tokenizer-model"),
        (plan((a,)), f"{tmp_path}/b.jsonl is absent"),
        (plan((b, a)), "the order or the row groups"),
        (plan((a, f"c={tmp_path}/b.jsonl")), f"{tmp_path}/b.jsonl is "),
    ):
        assert named in (changed.difference(begun) or "")
    monkeypatch.setattr(staging, "_MAX_SHARDS", 100)
    with pytest.raises(UserError, match=r"^--shard-bytes 1 makes \d+ shards; increase it$"):
        plan((a, b), shard_bytes=1)


SOURCES = st.builds(
    lambda size, cuttable: Source("", "lines", "", bytes=size, cuttable=cuttable),
    st.integers(0, 1000),
    st.booleans(),
)


@given(st.lists(SOURCES, max_size=20), st.integers(1, 300))
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


def write_corpus(root, *names, overwrite=False):
    with corpus_folder(root, overwrite, shared=False) as folder:
        for name in [*names, "corpus.json"]:
            write(folder.staging / "corpus", name)
        folder.publish(folder.staging / "corpus")


def put_shard(folder):
    write(folder.staging / "shard", "shard.json")
    folder.put_shard(folder.staging / "shard", 0)


def test_a_corpus_is_replaced_only_with_overwrite_and_other_files_never(tmp_path):
    write(tmp_path / "other", "tokens/a-train.bin")
    with pytest.raises(UserError, match=r"a-train\.bin"):
        write_corpus(tmp_path / "other", "tokenizer.json", overwrite=True)
    assert left_in(tmp_path / "other") == ["tokens/a-train.bin"]

    root = tmp_path / "corpus"
    old = ["tokens/a-train.bin", "tokens/old-train.idx", "tokenizer.model", "sources.json"]
    write_corpus(root, *old, "discovered.json", "discovered.safetensors", "tokenizer.tiktoken")
    (root / "notes.txt").touch()
    with pytest.raises(UserError, match="--overwrite"):
        write_corpus(root, "tokens/a-train.bin")
    before = left_in(root)
    for any_shard in (False, True):
        with corpus_folder(root, overwrite=True, shared=False) as folder:
            folder.agree(PLAN)
            if any_shard:
                put_shard(folder)
            write(folder.staging, "half-written")
        assert [name for name in left_in(root) if ".partial" not in name] == before
        assert (root / ".partial").exists() == any_shard
    write_corpus(root, "tokens/a-train.bin", "tokenizer.json", overwrite=True)
    assert left_in(root) == ["corpus.json", "notes.txt", "tokenizer.json", "tokens/a-train.bin"]


@pytest.mark.parametrize("links", [True, False])
def test_another_plan_is_rejected_while_work_by_the_first_exists(tmp_path, monkeypatch, links):
    def reject(source, target):
        raise PermissionError(1, "no hard links here", source)

    if not links:
        monkeypatch.setattr(os, "link", reject)
    stale = f"{socket.gethostname()}-{LARGER_THAN_ANY_PROCESS_ID}-abc"  # left by a killed process
    write(tmp_path / ".partial" / "staging" / stale, "half-written")
    with corpus_folder(tmp_path, overwrite=False, shared=True) as first:
        first.agree(PLAN)
        with corpus_folder(tmp_path, overwrite=False, shared=True) as second:
            with pytest.raises(UserError, match="--split"):
                second.agree(OTHER_PLAN)
            assert second.agree(PLAN).options == PLAN.options
        assert first.agree(OTHER_PLAN).options == OTHER_PLAN.options
        put_shard(first)
        with pytest.raises(UserError, match="--split is '90,5,5' and was '80,10,10'"):
            first.agree(PLAN)


def test_shards_are_removed_by_one_rename_and_before_published(tmp_path, monkeypatch):
    partial, remove, states = tmp_path / ".partial", shutil.rmtree, []

    def record(path, **options):
        states.append((path == partial, sorted(child.name for child in partial.iterdir())))
        remove(path, **options)

    with corpus_folder(tmp_path, overwrite=False, shared=False) as folder:
        put_shard(folder)
        write(partial / "removed" / "000000", "shard.json")  # left by a killed run
        write(partial, "published")
        monkeypatch.setattr(shutil, "rmtree", record)
        folder.remove_work()
        monkeypatch.undo()
    assert "shards" not in {name for _, names in states for name in names}
    assert [names for is_all, names in states if is_all] == [["published", "staging"]]
    assert not partial.exists()


def test_a_folder_has_one_writer_unless_it_is_shared(tmp_path):
    def is_open_to(shared):
        try:
            with corpus_folder(tmp_path, overwrite=False, shared=shared):
                return True
        except UserError as error:
            return "another process" not in str(error)

    for held, others in ((False, [False, False]), (True, [False, True])):
        with corpus_folder(tmp_path, overwrite=False, shared=held) as folder:
            write(folder.staging, "half-written")
            assert [is_open_to(shared) for shared in (False, True)] == others
            assert (folder.staging / "half-written").exists()


def test_only_stale_directories_of_this_machine_are_removed(tmp_path):
    host = socket.gethostname()
    # The first folder was left by a killed process; the second belongs to another machine.
    for name in (f"{host}-7-abc", f"{host}-b-7-abc"):
        write(tmp_path / ".partial" / "staging" / name, "half-written")
    for shared in (True, False):
        with corpus_folder(tmp_path, overwrite=False, shared=shared) as folder:
            found = {path.name for path in folder.staging.parent.iterdir()}
            assert (f"{host}-7-abc" in found) == shared
            assert {folder.staging.name, f"{host}-b-7-abc"} <= found
