"""What a run goes on from: its last whole checkpoint, and the same options."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import CheckpointWarning, find_checkpoint, step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.checkpointing import FREE_OPTIONS
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    OptimizerOptions,
    PretrainOptions,
)
from megatron_chameleon.training.run_folder import Progress
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.training.progress import losses, progress_of_run


@pytest.fixture
def progress_of(pretrain_options):
    """``progress_of(run_dir, **changes)``: where the run stands for one who asks for these."""

    def find(run_dir, **changes):
        return progress_of_run(pretrain_options(run_dir, **changes))

    return find


def steps_of(run_dir):
    return [record["step"] for record in read_metrics(run_dir / METRICS_NAME)]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_without_a_run_starts_one_and_loses_nothing(progress_of, tmp_path, overwrite):
    run_dir = tmp_path / "run"
    assert progress_of(run_dir, overwrite=overwrite) == Progress()
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    assert progress_of(run_dir, overwrite=overwrite).step == 0
    assert (run_dir / "notes.txt").read_text() == "mine"


OTHER: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "--seed 1234, not 7"),
    ({"train_iters": 8}, "--train-iters 6, not 8"),
    ({"global_batch_size": 4}, "--global-batch-size 8, not 4"),
    ({"seq_length": 16}, "--seq-length 32, not 16"),
    ({"model_size": "tiny"}, "--model-size nano, not tiny"),
    ({"bf16": True}, "--bf16 False, not True"),
    ({"data": DataOptions(permutation="epoch")}, "--permutation megatron, not epoch"),
    (
        {"boundaries": DocumentBoundaryOptions(eod_mask_loss=True)},
        "--eod-mask-loss False, not True",
    ),
    ({"optimizer": OptimizerOptions(lr=2e-2, lr_warmup_iters=2)}, "--lr 0.01, not 0.02"),
    ({"optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=3)}, "--lr-warmup-iters 2, not 3"),
]


@pytest.mark.parametrize(("changes", "message"), OTHER)
def test_run_of_other_options_is_rejected_by_flag(progress_of, trained_run, changes, message):
    before = contents(trained_run)
    with pytest.raises(UserError, match=message):
        progress_of(trained_run, **changes)
    assert contents(trained_run) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 2},
        {"log_interval": 1},
        {"save_interval": 1},
        {"checkpointing": CheckpointingOptions(async_save=True, keep_last_checkpoints=0)},
        {"data": DataOptions(verify_corpus=True, data_cache_path=Path("cache"))},
        {"parallel": TrainingParallelOptions(tensor_model_parallel_size=2)},
    ],
)
def test_what_changes_no_number_may_be_another(progress_of, trained_run, changes):
    assert progress_of(trained_run, **changes).step == 6


def test_every_option_is_either_free_or_tried_above():
    tried = {name for changes, _ in OTHER for name in changes}
    data = {field.name for field in dataclasses.fields(DataOptions)}
    free = set(FREE_OPTIONS)
    assert tried | (free - data) == {field.name for field in dataclasses.fields(PretrainOptions)}
    assert data - free == {"permutation"}


def test_a_corpus_may_have_moved_but_not_changed(progress_of, trained_run, corpus, tmp_path):
    moved = Path(shutil.copytree(corpus.root, tmp_path / "moved"))
    assert progress_of(trained_run, corpus=moved).step == 6
    changed = write_small_corpus(tmp_path / "changed", seed=1)
    with pytest.raises(UserError, match="corpus"):
        progress_of(trained_run, corpus=changed.root)


def test_a_mixture_is_the_same_by_its_weights(progress_of, trained_run, tmp_path):
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(json.dumps({"weights": dict.fromkeys(DOMAINS, 1 / 3)}))
    other.write_text(json.dumps({"weights": dict(zip(DOMAINS, [0.2, 0.3, 0.5], strict=True))}))
    assert progress_of(trained_run, mixture=str(same)).step == 6
    with pytest.raises(UserError, match=r"holds a run with mixture uniform .*, not .*other.json"):
        progress_of(trained_run, mixture=str(other))


def largest_file(folder):
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(progress_of, trained_run, damage):
    path = largest_file(step_folder(trained_run, 6))
    damage(path)
    with pytest.warns(CheckpointWarning) as warned:
        assert progress_of(trained_run).step == 3
    (line,) = (str(warning.message) for warning in warned)
    assert str(path) in line
    assert steps_of(trained_run) == [2, 3]
    assert find_checkpoint(trained_run) == step_folder(trained_run, 3)
    kept = step_folder(trained_run, 6).with_name("unused-step-00000006")
    assert kept.is_dir()
    assert not step_folder(trained_run, 6).exists()


def test_a_run_with_a_damaged_checkpoint_ends_as_if_it_had_never_been(
    pretrain_options, trained_run, finished_run
):
    flip_a_bit(largest_file(step_folder(trained_run, 6)))
    with pytest.warns(CheckpointWarning, match="step 3"):
        pretrain(pretrain_options(trained_run))
    assert losses(trained_run) == losses(finished_run)
    again, whole = (CheckpointRecord.load(step_folder(r, 6)) for r in (trained_run, finished_run))
    assert again.hash == whole.hash


def test_a_run_of_which_no_checkpoint_is_whole_is_refused_and_left_as_it_is(
    progress_of, trained_run
):
    for step in (3, 6):
        flip_a_bit(largest_file(step_folder(trained_run, step)))
    before = contents(trained_run)
    with pytest.raises(UserError, match="step-00000006/"):
        progress_of(trained_run)
    assert contents(trained_run) == before


def test_a_run_goes_back_to_the_checkpoint_that_latest_names(
    progress_of, pretrain_options, trained_run, finished_run
):
    (trained_run / "checkpoints" / "latest").write_text("step-00000003\n")
    assert progress_of(trained_run).step == 3
    pretrain(pretrain_options(trained_run))
    names = sorted(path.name for path in (trained_run / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000006", "unused-step-00000006"]
    assert losses(trained_run) == losses(finished_run)


def test_the_optimizers_form_cannot_change(progress_of, trained_run):
    sharded = TrainingParallelOptions(use_distributed_optimizer=True)
    with pytest.raises(UserError, match="--use-distributed-optimizer"):
        progress_of(trained_run, parallel=sharded)
