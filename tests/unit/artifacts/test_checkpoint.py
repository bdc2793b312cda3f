"""Checkpoint folders: lookup, damage, and leftovers of killed saves."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointWarning,
    checkpoint_folders,
    go_back_to,
    keep_last,
    remove_leftovers,
    step_folder,
)
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import checkpoint_in


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint_in(step_folder(tmp_path, step))
    return tmp_path


def test_latest_checkpoint_of_a_run_is_found(tmp_path):
    steps = [step_folder(tmp_path, step) for step in (500, 1000, 99_999_999)]
    for folder in reversed(steps):
        checkpoint_in(folder)
    step_folder(tmp_path, 100_000_000).mkdir()  # without a record, it is no checkpoint
    assert checkpoint_folders(tmp_path) == steps
    assert find_checkpoint(tmp_path) == find_checkpoint(steps[-1]) == steps[-1]
    with pytest.raises(UserError, match=r"--checkpoint .*nowhere: no such folder"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--checkpoint .*neither a checkpoint nor a run"):
        find_checkpoint(tmp_path / "empty")


def test_damaged_checkpoint_of_a_run_is_skipped_with_a_warning(run):
    newest, older = step_folder(run, 2), step_folder(run, 1)
    (newest / "common.pt").write_bytes(b"content of common.pT")
    with pytest.warns(CheckpointWarning, match=r"step-00000002/common\.pt has changed") as warned:
        assert find_checkpoint(run) == older
    assert str(warned[0].message).endswith(f"using {older}")
    (older / "common.pt").unlink()
    with pytest.raises(UserError, match=r"step-00000002/common\.pt has changed .* no intact"):
        find_checkpoint(run)


def test_checkpoint_with_a_damaged_record_is_skipped(run):
    """Cover a record that is not JSON, and a record that does not list a file."""
    path = step_folder(run, 2) / "checkpoint.json"
    body = json.loads(path.read_text())
    del body["files"]["common.pt"], body["checksum"]
    for content in (b"", b"\xff", b"[" * 100_000, json.dumps(body).encode()):
        path.write_bytes(content)
        with pytest.warns(CheckpointWarning, match="step-00000002"):
            assert find_checkpoint(run) == step_folder(run, 1)


def test_going_back_renames_newer_checkpoints(run):
    names = []
    for content in ("first", "second"):
        (step_folder(run, 2) / "content").write_text(content)
        (moved,) = go_back_to(run, 1)
        names.append(moved.name)
        assert (moved / "content").read_text() == content
        assert checkpoint_folders(run) == [step_folder(run, 1)]
        checkpoint_in(step_folder(run, 2))
    assert names == ["unused-step-00000002", "unused-step-00000002-2"]


def set_aside(folder):
    """Mimic a save of the same step that was killed between its two renames."""
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    folder.with_name(f".{folder.name}.1a2b3c4d.tmp").mkdir(exist_ok=True)


def test_removing_leftovers_restores_a_checkpoint_set_aside_by_a_killed_save(run):
    newest = step_folder(run, 2)
    (run / ".run.json.e.tmp").write_text("{")
    for remove in (
        lambda: remove_leftovers(newest.parent, newest.name),
        lambda: go_back_to(run, 2),
        lambda: find_checkpoint(run) and go_back_to(run, 2),
        lambda: find_checkpoint(newest) and go_back_to(run, 2),
    ):
        set_aside(newest)
        remove()
        assert checkpoint_folders(run) == [step_folder(run, step) for step in (1, 2)]
        CheckpointRecord.load(newest).verify()
        # This is the state after a save that was killed after both renames.
        checkpoint_in(newest.with_name(f".{newest.name}.replaced"))
        remove()
        assert len(list(newest.parent.iterdir())) == 2
    assert not list(run.rglob("*.tmp"))


def test_copies_by_users_and_other_folders_are_untouched(tmp_path):
    for name in ("step-00000001", "step-00000001-good", "step-00000002", "step-00000003.bak"):
        checkpoint_in(tmp_path / "checkpoints" / name)
    keep_last(tmp_path, 1)
    go_back_to(tmp_path, 2)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert left == {"step-00000001-good", "step-00000002", "step-00000003.bak"}


def test_the_last_checkpoints_and_those_of_kept_steps_remain(tmp_path):
    for step in range(1, 7):
        checkpoint_in(step_folder(tmp_path, step))
    keep_last(tmp_path, 2, steps=(1, 3, 7))
    assert checkpoint_folders(tmp_path) == [step_folder(tmp_path, n) for n in (1, 3, 5, 6)]


def test_hash_tells_rotary_models_with_the_same_tensors_apart(tmp_path):
    record = checkpoint_in(tmp_path / "a")
    rope = {"position_embedding_type": "rope", "rotary_base": 1e4}
    models = [{}, rope, {**rope, "rotary_base": 1e6}]
    hashes = [dataclasses.replace(record, model=record.model | model).hash for model in models]
    assert hashes[0] == record.hash
    assert len(set(hashes)) == 3
