from __future__ import annotations

import json
import os
import shutil

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointWarning,
    checkpoint_folders,
    finish_latest,
    go_back_to,
    keep_last,
    naming_latest,
    remove_leftovers,
    remove_leftovers_of_run,
    step_folder,
)
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import checkpoint_in


@pytest.fixture
def record(tmp_path):
    return checkpoint_in(tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", ["missing", "longer", "shorter", "folder"])
def test_a_checkpoint_with_a_damaged_file_is_refused(record, damage):
    path = record.root / "__0_0.distcp"
    if damage == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "shorter":
        os.truncate(path, 3)
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(
        UserError, match=r"__0_0\.distcp (is missing|has .* bytes).*; use an earlier"
    ):
        CheckpointRecord.load(record.root)


def test_verify_tells_changed_contents_of_the_same_size(record):
    record.verify()
    (record.root / "common.pt").write_bytes(b"state of the optimixer")
    damaged = CheckpointRecord.load(record.root)
    with pytest.raises(UserError, match=r"common\.pt has changed since it was written"):
        damaged.verify()


def test_the_hash_is_that_of_the_files_wherever_they_lie(record, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(record.root, moved)
    assert CheckpointRecord.load(moved).hash == record.hash
    other = tmp_path / "other"
    shutil.copytree(record.root, other)
    (other / "__0_0.distcp").write_bytes(b"WEIGHTS")
    from megatron_chameleon.artifacts.checkpoint import hash_files

    assert hash_files(other)["__0_0.distcp"] != record.files["__0_0.distcp"]
    assert set(hash_files(other)) == {path.name for path in other.iterdir()} - {"checkpoint.json"}


def test_a_checkpoint_folder_is_found_as_itself(record):
    assert find_checkpoint(record.root) == record.root


def test_the_latest_checkpoint_of_a_run_is_found(tmp_path):
    run = tmp_path / "run"
    for step in (500, 99_999_999, 1000):
        checkpoint_in(step_folder(run, step))
    # A folder that a killed run left has no record yet.
    step_folder(run, 100_000_000 - 1).with_name("step-99999999.tmp").mkdir()
    assert find_checkpoint(run) == step_folder(run, 99_999_999)
    assert checkpoint_folders(run) == [step_folder(run, s) for s in (500, 1000, 99_999_999)]


@pytest.mark.parametrize("latest", [None, "step-00000003", "", "../outside", "step-00000001\n"])
def test_latest_is_heeded_where_it_names_a_whole_folder_of_the_run(tmp_path, latest):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    if latest is not None:
        (tmp_path / "checkpoints" / "latest").write_text(latest)
    newest = 1 if latest == "step-00000001\n" else 2
    assert find_checkpoint(tmp_path) == step_folder(tmp_path, newest)
    assert checkpoint_folders(tmp_path)[-1] == step_folder(tmp_path, newest)


def test_a_damaged_latest_checkpoint_is_passed_over_with_a_warning(tmp_path):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    (step_folder(tmp_path, 2) / "common.pt").write_bytes(b"state of the optimixer")
    with pytest.warns(CheckpointWarning, match=r"step-00000002/common\.pt has changed") as warned:
        assert find_checkpoint(tmp_path) == step_folder(tmp_path, 1)
    assert str(warned[0].message).endswith(f"using {step_folder(tmp_path, 1)}")
    with pytest.raises(UserError, match=r"common\.pt has changed"):
        find_checkpoint(step_folder(tmp_path, 2))  # what is named itself has nothing in its place
    (step_folder(tmp_path, 1) / "common.pt").unlink()
    with pytest.raises(UserError, match=r"step-00000002/common\.pt has changed .* no intact"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"kind": "checkpoint", "format_version": 2, "files": {}}',
    ],
    ids=["empty", "not UTF-8", "no object", "deep", "long integer", "no fields"],
)
def test_a_damaged_record_is_passed_over_for_an_older_checkpoint(tmp_path, content):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    (step_folder(tmp_path, 2) / "checkpoint.json").write_bytes(content)
    with pytest.warns(CheckpointWarning, match=r"step-00000002/checkpoint\.json"):
        assert find_checkpoint(tmp_path) == step_folder(tmp_path, 1)


def test_a_latest_checkpoint_without_a_record_is_passed_over_with_a_warning(tmp_path):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    (tmp_path / "checkpoints/latest").write_text("step-00000002\n")
    (step_folder(tmp_path, 2) / "checkpoint.json").unlink()
    with pytest.warns(CheckpointWarning, match="step-00000002"):
        assert find_checkpoint(tmp_path) == step_folder(tmp_path, 1)


@pytest.mark.parametrize("left_out", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json"])
def test_a_record_that_does_not_list_all_files_is_passed_over(tmp_path, left_out):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    path = step_folder(tmp_path, 2) / "checkpoint.json"
    body = json.loads(path.read_text())
    del body["files"][left_out], body["checksum"]
    path.write_text(json.dumps(body))
    with pytest.warns(CheckpointWarning, match=r"field files"):
        assert find_checkpoint(tmp_path) == step_folder(tmp_path, 1)


def test_the_shares_of_those_who_verify_together_are_all_of_it(record):
    for shares in (1, 2, 3):
        read: list[int] = []
        for share in range(shares):
            record.verify(share, shares, read.append)
        assert sum(read) == sum(file.bytes for file in record.files.values())
        assert sum(read) == sum(record.bytes_to_verify(share, shares) for share in range(shares))


def test_going_back_keeps_what_is_newer_under_another_name(tmp_path):
    for step in (1, 2, 3):
        checkpoint_in(step_folder(tmp_path, step))
    moved = go_back_to(tmp_path, 1)
    assert [path.name for path in moved] == ["unused-step-00000002", "unused-step-00000003"]
    assert all(CheckpointRecord.load(path) for path in moved)
    assert checkpoint_folders(tmp_path) == [step_folder(tmp_path, 1)]
    assert go_back_to(tmp_path, 1) == []


def test_a_step_that_is_set_aside_again_leaves_what_was_kept_before(tmp_path):
    checkpoint_in(step_folder(tmp_path, 1))
    names = []
    for content in ("first", "second", "third"):
        (checkpoint_in(step_folder(tmp_path, 2)).root / "mine").write_text(content)
        (moved,) = go_back_to(tmp_path, 1)
        names.append(moved.name)
    assert names == [f"unused-step-00000002{number}" for number in ("", "-2", "-3")]
    kept = [tmp_path / "checkpoints" / name / "mine" for name in names]
    assert [path.read_text() for path in kept] == ["first", "second", "third"]


def set_aside(folder):
    """As a save of the same step that was killed between its two renames leaves it."""
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    folder.with_name(f".{folder.name}.1a2b3c4d.tmp").mkdir(exist_ok=True)


def test_a_checkpoint_that_a_killed_save_has_set_aside_is_found(tmp_path):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    newest = step_folder(tmp_path, 2)
    for path in (tmp_path, newest):
        set_aside(newest)
        assert find_checkpoint(path) == newest


@pytest.mark.parametrize(
    "remove", [remove_leftovers, lambda f: remove_leftovers_of_run(f.parents[1])]
)
def test_clearing_up_puts_back_what_a_killed_save_has_set_aside(tmp_path, remove):
    folder = step_folder(tmp_path, 2)
    checkpoint_in(folder)
    set_aside(folder)
    remove(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    CheckpointRecord.load(folder).verify()
    checkpoint_in(folder.with_name(f".{folder.name}.replaced"))  # killed after its second rename
    remove(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_save_that_was_killed_before_it_named_the_latest_is_finished(tmp_path):
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
        with naming_latest(step_folder(tmp_path, step)):
            pass
    checkpoint_in(step_folder(tmp_path, 3))
    folder = tmp_path / "checkpoints"
    for name, step in (("a", 1), ("b", 3), ("c", 4)):
        (folder / f".latest.{name}.tmp").write_text(f"step-{step:08d}\n")
    for name, content in (("d", b"\xff"), ("e", b""), ("f", b"../step-00000003")):
        (folder / f".latest.{name}.tmp").write_bytes(content)
    (tmp_path / ".run.json.e.tmp").write_text("{")
    finish_latest(tmp_path)
    remove_leftovers_of_run(tmp_path)
    assert checkpoint_folders(tmp_path) == [step_folder(tmp_path, step) for step in (1, 2, 3)]
    assert (folder / "latest").read_text() == "step-00000003\n"
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_pipe_in_place_of_the_name_of_the_latest_is_not_read(tmp_path):
    checkpoint_in(step_folder(tmp_path, 1))
    os.mkfifo(tmp_path / "checkpoints" / "latest")
    assert find_checkpoint(tmp_path) == step_folder(tmp_path, 1)


def test_a_folder_without_checkpoints_is_refused_with_what_it_would_need(tmp_path):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"--checkpoint .*neither a checkpoint nor a run") as no:
            find_checkpoint(path)
        assert f"{path}/checkpoints/step-*/checkpoint.json" in str(no.value)


def test_a_copy_that_somebody_has_made_of_a_checkpoint_is_left_alone(tmp_path):
    for name in ("step-00000001", "step-00000001-good", "step-00000002", "step-00000003.bak"):
        checkpoint_in(tmp_path / "checkpoints" / name)
    keep_last(tmp_path, 1)
    go_back_to(tmp_path, 2)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert left == {"step-00000001-good", "step-00000002", "step-00000003.bak"}


def test_what_others_are_writing_beside_is_not_cleared_up(tmp_path):
    for name in (".gpt2.1a2b3c4d.tmp", ".gpt2.v2.1a2b3c4d.tmp", ".gpt2.old.tmp"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path / "gpt2")
    assert [path.name for path in tmp_path.iterdir()] == [".gpt2.v2.1a2b3c4d.tmp"]
