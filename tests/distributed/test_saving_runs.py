"""What becomes of a run when a save is disturbed: nothing that the next one does not make good."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, TrainingRun
from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME, checkpoint_folders, step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from tests.distributed.conftest import CLOCK_FIELDS
from tests.distributed.launch import finish, start
from tests.distributed.layout_cases import SAVE_INTERVAL, TRAIN_ITERS
from tests.distributed.saving_cases import KILLS_ITSELF, SAVING

SECONDS = 240.0
FULL = [name for name, case in SAVING.items() if case.full_rank is not None]


@pytest.mark.parametrize("name", SAVING)
def test_however_it_is_saved_the_run_is_the_same_to_the_bit(results, name):
    origin = SAVING[name].origin
    assert results.metrics(name) == results.metrics(origin)
    found, expected = (results.checkpoint(run, TRAIN_ITERS) for run in (name, origin))
    found.verify()
    assert found.hash == expected.hash


def test_what_is_written_beside_training_is_the_same_to_the_bit(results):
    found, expected = (
        results.checkpoint(run, SAVE_INTERVAL) for run in ("dp2-sharded-async", "dp2-sharded")
    )
    found.verify()
    assert found.hash == expected.hash
    assert {name for name in found.files if name.startswith("__1_")}  # both ranks have written


def test_each_data_parallel_rank_writes_a_part_of_what_they_share(results):
    sizes = [0, 0]
    for name, file in results.checkpoint("dp2", TRAIN_ITERS).files.items():
        if name.endswith(".distcp"):
            sizes[int(name.split("_")[2])] += file.bytes
    assert 0.4 < sizes[0] / sum(sizes) < 0.6


def test_older_checkpoints_are_gone_and_the_last_three_are_left(results):
    results.require("dp2-sharded-async")
    folder = results.places.run("dp2-sharded-async")
    steps = [path.name for path in checkpoint_folders(folder)]
    assert steps == ["step-00000006", "step-00000009", "step-00000012"]


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_on_one_rank_of_two_costs_checkpoints_and_nothing_else(results, name):
    results.require(name)
    folder, rank = results.places.run(name), SAVING[name].full_rank
    run = TrainingRun.load(folder)
    assert run.status == "finished"
    failed = {save.step: save.problem for save in run.failed_saves}
    assert list(failed) == [6]
    assert all(f"(rank {rank}: " in problem for problem in failed.values())
    left = {path.name for path in (folder / FOLDER_NAME).iterdir()}
    whole = {f"step-{step:08d}" for step in (3, 6, 9, 12) if step not in failed}
    assert left == {*whole, "latest"}


@dataclasses.dataclass(frozen=True)
class Killed:
    """What a start of the run left behind."""

    status: int
    said: str
    left: list[str]


@pytest.fixture(scope="module")
def killed(places) -> dict[str, Killed]:
    """One run, killed in the middle of two saves and then left to end."""
    log = places.root / f"{NAME}.log"
    script = Path(__file__).with_name("saving_ranks.py")
    command = [sys.executable, str(script), str(places.root), NAME, *MOMENTS]
    assert finish(start(command, log), SECONDS) == 0, log.read_text()
    return {moment: killed_then(places, moment) for moment in MOMENTS}


MOMENTS = ("in-save", "beside-training", "never")
NAME = "killed-in-saves"


def killed_then(places, moment: str) -> Killed:
    log = places.root / f"{NAME}-{moment}.log"
    return Killed(said=log.read_text(), **json.loads(log.with_suffix(".json").read_text()))


@pytest.mark.parametrize(
    ("moment", "whole", "under_way"),
    [
        ("in-save", ["step-00000003"], 6),
        ("beside-training", ["step-00000003", "step-00000006"], 9),
    ],
)
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoints_before(
    killed, moment, whole, under_way
):
    found = killed[moment]
    assert found.status != 0
    assert KILLS_ITSELF in found.said
    temporary, *others = found.left
    assert re.fullmatch(rf"\.step-{under_way:08d}\.\w+\.tmp", temporary), found.said
    assert others == ["latest", *whole]


def test_the_run_then_ends_as_if_never_killed(results, places, killed):
    assert killed["never"].status == 0, killed["never"].said
    assert "continuing at step 3:" in killed["beside-training"].said
    assert "continuing at step 6:" in killed["never"].said
    assert killed["never"].left == ["latest", "step-00000006", "step-00000009", "step-00000012"]
    lines = [
        {name: value for name, value in line.items() if name not in CLOCK_FIELDS}
        for line in read_metrics(places.run(NAME) / METRICS_NAME)
    ]
    assert lines == results.metrics("dp2-sharded")
    record = CheckpointRecord.load(step_folder(places.run(NAME), TRAIN_ITERS))
    record.verify()
    assert record.hash == results.checkpoint("dp2-sharded", TRAIN_ITERS).hash
