from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_chameleon.corpus import staging
from megatron_chameleon.corpus.plan import Plan
from megatron_chameleon.corpus.sources import Piece, Source
from megatron_chameleon.corpus.staging import _try_lock as try_lock
from megatron_chameleon.corpus.staging import corpus_folder, staging_directory
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import left_in

PLAN = Plan(
    root=Path(),
    options={"split": "90,5,5"},
    tokenizer="0" * 64,
    versions={},
    sources=[Source("a", "lines", "a", bytes=10)],
    shards=[[Piece(0, 0, None, 10)]],
)


def write(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"kind": "corpus"}' if name == "corpus.json" else name)


def write_corpus(root, names, overwrite=False):
    with corpus_folder(root, overwrite, shared=False) as folder:
        for name in [*names, "corpus.json"]:
            write(folder.staging / "corpus", name)
        folder.publish(folder.staging / "corpus")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokens/a-train.bin", "discovered.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_other_origin_are_not_replaced(tmp_path, name, overwrite):
    write(tmp_path, name)
    with pytest.raises(UserError, match=f"{name} exists"):
        write_corpus(tmp_path, ["tokenizer.json"], overwrite)
    assert left_in(tmp_path) == [name]


@pytest.mark.parametrize("content", ["mine", '{"kind": "mixture"}'])
def test_a_corpus_json_that_is_no_corpuss_is_not_replaced(tmp_path, content):
    (tmp_path / "corpus.json").write_text(content)
    write(tmp_path, "tokenizer.json")
    with pytest.raises(UserError, match=r"corpus\.json exists"):
        write_corpus(tmp_path, ["tokenizer.json"], overwrite=True)
    assert left_in(tmp_path) == ["corpus.json", "tokenizer.json"]


def put_shard(folder, number, content="tokens"):
    written = folder.staging / "shard"
    written.mkdir()
    (written / "shard.json").write_text(content)
    folder.put_shard(written, number)


def fail(root, error, shards=0, overwrite=False):
    with corpus_folder(root, overwrite, shared=False) as folder:
        folder.agree(PLAN)
        for number in range(shards):
            put_shard(folder, number)
        write(folder.staging, "half-written")
        raise error


def test_files_appear_under_their_names_when_published(tmp_path):
    root = tmp_path / "deep" / "corpus"
    with corpus_folder(root, overwrite=False, shared=False) as folder:
        folder.agree(PLAN)
        put_shard(folder, 0)
        for name in ("tokenizer.json", "tokens/a-train.bin", "corpus.json"):
            write(folder.staging / "corpus", name)
        assert {path.parts[len(root.parts)] for path in root.rglob("*")} == {".partial"}
        folder.publish(folder.staging / "corpus")
        here = ["corpus.json", "tokenizer.json", "tokens/a-train.bin"]
        assert [name for name in left_in(root) if not name.startswith(".partial/staging")] == here
    assert left_in(root) == here
    assert not (root / ".partial").exists()


@pytest.mark.parametrize("error", [UserError, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_of_a_run_that_fails_before_a_shard_is_finished(tmp_path, error):
    with pytest.raises(error):
        fail(tmp_path / "corpus", error)
    assert not (tmp_path / "corpus").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(error):
        fail(tmp_path / "mine", error)
    assert left_in(tmp_path) == ["mine/notes.txt"]


@pytest.mark.parametrize("error", [UserError, RuntimeError, KeyboardInterrupt])
def test_finished_shards_are_kept_and_nothing_half_written(tmp_path, error):
    with pytest.raises(error):
        fail(tmp_path, error, shards=2)
    plan_and_shards = [".partial/plan.json"] + [
        f".partial/shards/00000{number}/shard.json" for number in (0, 1)
    ]
    assert left_in(tmp_path) == plan_and_shards
    with corpus_folder(tmp_path, overwrite=False, shared=False) as folder:
        assert folder.agree(PLAN) == dataclasses.replace(PLAN, root=folder.partial)
        assert folder.finished() == {0, 1}


def test_a_shard_that_is_there_stays(tmp_path):
    with corpus_folder(tmp_path, overwrite=False, shared=True) as folder:
        put_shard(folder, 3, "first")
        put_shard(folder, 3, "second")
        assert (folder.shard_folder(3) / "shard.json").read_text() == "first"
        assert folder.finished() == {3}
        assert not list(folder.staging.iterdir())


def test_a_corpus_is_replaced_only_when_asked(tmp_path):
    old = ["tokens/a-train.bin", "tokens/old-train.idx", "tokenizer.model", "sources.json"]
    old += ["discovered.json", "discovered.safetensors"]
    write_corpus(tmp_path, [*old, "tokenizer.tiktoken"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"already holds a corpus; .* --overwrite"):
        write_corpus(tmp_path, ["tokens/a-train.bin"])
    write_corpus(tmp_path, ["tokens/a-train.bin", "tokenizer.json"], overwrite=True)
    assert left_in(tmp_path) == ["corpus.json", "notes.txt", "tokenizer.json", "tokens/a-train.bin"]


@pytest.mark.parametrize("shards", [0, 1])
def test_the_old_corpus_stays_if_its_replacement_fails(tmp_path, shards):
    write_corpus(tmp_path, ["tokens/a-train.bin"])
    before = left_in(tmp_path)
    with pytest.raises(RuntimeError):
        fail(tmp_path, RuntimeError, shards, overwrite=True)
    assert [name for name in left_in(tmp_path) if not name.startswith(".partial")] == before
    assert (tmp_path / ".partial").exists() == (shards > 0)


def test_another_plan_is_refused_where_a_shard_is_finished_and_taken_where_none_is(tmp_path):
    other = dataclasses.replace(PLAN, options={"split": "80,10,10"})
    with corpus_folder(tmp_path, overwrite=False, shared=False) as folder:
        folder.agree(PLAN)
        assert folder.agree(other).options == other.options
        assert Plan.load(folder.partial).options == other.options
        put_shard(folder, 0)
        with pytest.raises(UserError, match="--split is '90,5,5' and was '80,10,10' when"):
            folder.agree(PLAN)
        assert Plan.load(folder.partial).options == other.options


def test_another_plan_is_refused_while_somebody_works_by_the_first(tmp_path):
    other = dataclasses.replace(PLAN, options={"split": "80,10,10"})
    with (
        corpus_folder(tmp_path, overwrite=False, shared=True) as first,
        corpus_folder(tmp_path, overwrite=False, shared=True) as second,
    ):
        first.agree(PLAN)
        with pytest.raises(UserError, match="--split is '80,10,10' and was '90,5,5' when"):
            second.agree(other)
        assert second.agree(PLAN).options == PLAN.options


def test_a_disk_without_hard_links_will_do(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "no hard links here", source)

    monkeypatch.setattr(os, "link", refuse)
    test_another_plan_is_refused_while_somebody_works_by_the_first(tmp_path)


def test_two_runs_cannot_write_one_folder_unless_they_share_it(tmp_path):
    def enter(shared):
        with corpus_folder(tmp_path, overwrite=False, shared=shared):
            pass

    with corpus_folder(tmp_path, overwrite=False, shared=False) as folder:
        write(folder.staging, "half-written")
        for shared in (False, True):
            with pytest.raises(UserError, match="another process is writing"):
                enter(shared)
        assert (folder.staging / "half-written").exists()
    with corpus_folder(tmp_path, overwrite=False, shared=True):
        enter(shared=True)
        with pytest.raises(UserError, match="another process is writing"):
            enter(shared=False)
    enter(shared=False)


@pytest.mark.parametrize("slow", [False, True])
def test_many_can_come_and_go_at_once(tmp_path, monkeypatch, slow):
    def slow_lock(descriptor, kind):
        time.sleep(0.002)
        return try_lock(descriptor, kind)

    if slow:
        monkeypatch.setattr(staging, "_try_lock", slow_lock)

    def come_and_go(number):
        for _ in range(20):
            with staging_directory(tmp_path / "staging") as directory:
                (directory / "mine").write_text(f"{number}")
                time.sleep(0.0005)
                assert (directory / "mine").read_text() == f"{number}"
            if not slow:
                with contextlib.suppress(OSError):
                    (tmp_path / "staging").rmdir()
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(come_and_go, range(8))) == list(range(8))
    assert not left_in(tmp_path)


def test_the_directories_of_killed_processes_are_removed_and_no_others(tmp_path):
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
    (tmp_path / "elsewhere-abc").mkdir()  # of another machine: nobody here can tell
    with staging_directory(tmp_path) as first, staging_directory(tmp_path) as second:
        assert set(tmp_path.iterdir()) == {first, second, tmp_path / "elsewhere-abc"}
    assert set(tmp_path.iterdir()) == {tmp_path / "elsewhere-abc"}
