"""A rank is killed without warning; the same command goes on from the last checkpoint."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders, step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.options.checkpointing import CheckpointingOptions
from tests.distributed.launch import (
    finish,
    flags,
    kill_group,
    rank_process,
    start,
    torchrun,
    wait_for_step,
)
from tests.distributed.layout_cases import ONE, SAVE_INTERVAL, TP2, TRAIN_ITERS, training_options

SECONDS = 120.0
SECONDS_TO_BRING_ALL_DOWN = 60.0
SECONDS_TO_BE_GONE = 10.0
KILLED_AFTER_STEP = SAVE_INTERVAL + 2


@pytest.fixture(scope="module")
def command(places):
    options = training_options(places, "killed", TP2)
    return torchrun(TP2.ranks, "tools/pretrain_gpt.py", *flags(options))


@pytest.fixture(scope="module")
def killed(places, command) -> Path:
    """The folder of a run whose second rank was killed between two checkpoints."""
    log = places.root / "killed.log"
    process = start(command, log)
    try:
        wait_for_step(log, KILLED_AFTER_STEP, process)
        os.kill(rank_process(process.pid, rank=1), signal.SIGKILL)
        status = process.wait(SECONDS_TO_BRING_ALL_DOWN)
    finally:
        kill_group(process)
    assert status != 0
    assert re.search(r"Signal 9 \(SIGKILL\) received", log.read_text()), log.read_text()
    return places.run("killed")


@pytest.fixture(scope="module")
def continued(places, command, killed) -> Path:
    """The same folder after the same command once more, with other traces of a crash added."""
    saved = step_folder(killed, SAVE_INTERVAL)
    half_written = saved.with_name(f".step-{TRAIN_ITERS:08d}.tmp")
    shutil.copytree(saved, half_written)
    for part in half_written.glob("*.distcp"):
        os.truncate(part, part.stat().st_size // 2)
    with (killed / METRICS_NAME).open("a") as stream:
        stream.write('{"step": 9, "loss": 4.')
    log = places.root / "continued.log"
    assert finish(start(command, log), SECONDS) == 0, log.read_text()
    assert f"continuing at step {SAVE_INTERVAL}:" in log.read_text()
    return killed


def test_a_killed_run_leaves_whole_checkpoints_only(killed):
    assert checkpoint_folders(killed) == [step_folder(killed, SAVE_INTERVAL)]
    run = TrainingRun.load(killed)
    assert run.status in ("failed", "interrupted")  # rank 0 outlived the killed one
    assert KILLED_AFTER_STEP <= run.step < TRAIN_ITERS
    assert max(line["step"] for line in run.metrics()) >= KILLED_AFTER_STEP


def test_the_continued_run_is_bit_identical_to_an_uninterrupted_one(results, continued):
    from tests.distributed.conftest import CLOCK_FIELDS

    lines = [
        {name: value for name, value in line.items() if name not in CLOCK_FIELDS}
        for line in read_metrics(continued / METRICS_NAME)
    ]
    assert [line["step"] for line in lines] == list(range(1, TRAIN_ITERS + 1))
    assert lines == results.metrics("tp2")


def test_its_last_checkpoint_is_whole_and_identical_too(results, continued):
    from megatron_chameleon.artifacts import CheckpointRecord

    record = CheckpointRecord.load(step_folder(continued, TRAIN_ITERS))
    record.verify()
    assert record.hash == results.checkpoint("tp2", TRAIN_ITERS).hash


def test_nothing_half_written_is_left(continued):
    folder = step_folder(continued, TRAIN_ITERS).parent
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["latest", "step-00000006", "step-00000012"]
    assert not list(continued.glob(".*.tmp"))


def test_its_record_counts_every_token_once(results, continued):
    run = TrainingRun.load(continued)
    assert run.status == "finished"
    assert run.domain_tokens == TrainingRun.load(results.places.run("tp2")).domain_tokens


@pytest.mark.parametrize("async_save", [False, True])
def test_no_process_outlives_a_killed_rank(places, tmp_path, monkeypatch, async_save):
    """Without a launcher that would end what is left; megatron's saving would leave a server."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    checkpointing = CheckpointingOptions(async_save=async_save)
    options = dataclasses.replace(
        training_options(places, f"killed-alone-{async_save}", ONE),
        save_interval=2,
        checkpointing=checkpointing,
    )
    log = tmp_path / "log"
    process = start([sys.executable, "tools/pretrain_gpt.py", *flags(options)], log)
    try:
        wait_for_step(log, 5, process)
        begun = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(begun, timeout=SECONDS_TO_BE_GONE)
        assert [other.cmdline() for other in left] == []
    finally:
        kill_group(process)
    assert checkpoint_folders(options.run_dir)  # it had saved
    assert not list(tmp_path.glob("pymp-*"))
