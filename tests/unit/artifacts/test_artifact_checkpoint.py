from __future__ import annotations

import os
import shutil

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders, step_folder
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import checkpoint_in


@pytest.fixture
def record(tmp_path):
    return checkpoint_in(tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", ["missing", "longer", "shorter", "folder"])
def test_a_checkpoint_with_a_damaged_file_is_refused(record, damage):
    path = record.root / "weights.bin"
    if damage == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "shorter":
        os.truncate(path, 3)
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(UserError, match=r"weights\.bin is missing or .*; use an earlier one"):
        CheckpointRecord.load(record.root)


def test_verify_tells_changed_contents_of_the_same_size(record):
    record.verify()
    (record.root / "state.bin").write_bytes(b"state of the optimixer")
    damaged = CheckpointRecord.load(record.root)
    with pytest.raises(UserError, match=r"state\.bin has changed since it was written"):
        damaged.verify()


def test_the_hash_is_that_of_the_files_wherever_they_lie(record, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(record.root, moved)
    assert CheckpointRecord.load(moved).hash == record.hash
    other = tmp_path / "other"
    shutil.copytree(record.root, other)
    (other / "weights.bin").write_bytes(b"WEIGHTS")
    from megatron_chameleon.artifacts.checkpoint import hash_files

    assert hash_files(other)["weights.bin"] != record.files["weights.bin"]
    assert set(hash_files(other)) == {"weights.bin", "state.bin"}  # not the record itself


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


def test_a_folder_without_checkpoints_is_refused_with_what_it_would_need(tmp_path):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"--checkpoint .*neither a checkpoint nor a run") as no:
            find_checkpoint(path)
        assert f"{path}/checkpoints/step-*/checkpoint.json" in str(no.value)
