"""Where figures go: metrics.jsonl, TensorBoard's own reader, and W&B's own files."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.training.loggers import (
    JsonLinesLogger,
    TensorBoardLogger,
    WandbLogger,
    open_loggers,
    scalars,
)
from megatron_chameleon.training.options import LoggingOptions
from tests.full_disk import largest_file_size

FIGURES = {
    "loss": 3.5,
    "domain_loss": {"news": 3.25, "ü": math.nan},
    "drawn": {"news": {"got": 7, "asked": 8}},
    "skipped": [{"step": 3, "reason": "the loss is nan", "domain_loss": {"a": math.inf}}],
}


@pytest.fixture
def no_wandb(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_a_line_of_json_has_the_step_first_and_null_for_what_is_not_finite(tmp_path):
    logger = JsonLinesLogger(tmp_path / "metrics.jsonl")
    logger.log(5, FIGURES)
    logger.log(10, {"loss": math.nan})
    first, second = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert first.startswith('{"step": 5, "loss": 3.5, ')
    assert "ü" in first
    read = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["domain_loss"] == {"news": 3.25, "ü": None}
    assert read["skipped"][0]["domain_loss"] == {"a": None}
    assert json.loads(second) == {"step": 10, "loss": None}


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl"):
        JsonLinesLogger(tmp_path / "missing" / "metrics.jsonl").log(1, {})


def test_lines_for_which_there_is_no_room_wait_for_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    logger.log(1, {"loss": 1.0})
    with largest_file_size(path.stat().st_size + 5):
        for step in (2, 3):
            with pytest.warns(UserWarning, match=r"cannot write .*metrics\.jsonl.*; retrying"):
                logger.log(step, {"loss": 1.0})
        assert len(path.read_text().splitlines()) == 1
    logger.log(4, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_in_a_new_file_once_there_is_room(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, 0)
    logger.log(1, {"loss": 1.0})
    with (
        largest_file_size(10),
        pytest.warns(UserWarning, match=r"cannot write .*.* dropped"),
    ):
        logger.log(2, {"loss": 2.0})
    logger.log(3, {"loss": 3.0})
    logger.close()
    assert shown(tmp_path)["loss"] == [(1, 1.0), (3, 3.0)]


def test_tensorboard_begins_once_its_folder_can_be_written(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.write_text("a file in its place")
    with pytest.warns(UserWarning, match=r"cannot write .*tensorboard.*.* dropped"):
        logger = TensorBoardLogger(folder, 0)
    with pytest.warns(UserWarning, match="dropped"):
        logger.log(1, {"loss": 1.0})
    folder.unlink()
    logger.log(2, {"loss": 2.0})
    logger.close()
    assert shown(folder)["loss"] == [(2, 2.0)]


def test_scalars_are_finite_numbers_under_joined_names():
    assert dict(scalars(FIGURES)) == {
        "loss": 3.5,
        "domain_loss/news": 3.25,
        "drawn/news/got": 7.0,
        "drawn/news/asked": 8.0,
    }


def shown(folder):
    """Name -> [(step, value)] as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_shows_every_number(tmp_path):
    logger = TensorBoardLogger(tmp_path, first_step=0)
    logger.log(5, FIGURES)
    logger.log(10, {"loss": 2.5})
    assert shown(tmp_path)["loss"] == [(5, 3.5), (10, 2.5)]  # before it is closed
    logger.close()
    assert shown(tmp_path)["domain_loss/news"] == [(5, 3.25)]


def test_tensorboard_forgets_the_steps_that_a_continued_run_does_again(tmp_path):
    for first_step, losses in ((0, {5: 3.0, 10: 2.0, 15: 1.0}), (10, {15: 1.5})):
        logger = TensorBoardLogger(tmp_path, first_step)
        for step, loss in losses.items():
            logger.log(step, {"loss": loss})
        logger.close()
    assert shown(tmp_path)["loss"] == [(5, 3.0), (10, 2.0), (15, 1.5)]


def kinds(opened):
    for logger in opened:
        logger.close()
    return [type(logger).__name__ for logger in opened]


def test_lines_and_tensorboard_are_the_default(pretrain_options, tmp_path, no_wandb):
    opened = open_loggers(pretrain_options(tmp_path), 0)
    assert kinds(opened) == ["JsonLinesLogger", "TensorBoardLogger"]


def test_tensorboard_can_be_left_out(pretrain_options, tmp_path, no_wandb):
    options = pretrain_options(tmp_path, logging=LoggingOptions(tensorboard=False))
    assert kinds(open_loggers(options, 0)) == ["JsonLinesLogger"]


def test_what_is_not_installed_is_told_once_and_left_out(pretrain_options, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="is not installed") as told:
        opened = open_loggers(pretrain_options(tmp_path), 0)
    assert kinds(opened) == ["JsonLinesLogger"]
    said = [str(warning.message) for warning in told]
    assert [line.split()[3] for line in said] == ["tensorboard,", "wandb,"]
    assert "--no-tensorboard" in said[0]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra")
def test_weights_and_biases_takes_the_figures(pretrain_options, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = pretrain_options(
        tmp_path, logging=LoggingOptions(tensorboard=False, wandb_project="mixtures")
    )
    for _ in range(2):
        opened = open_loggers(options, 0)
        assert len(opened) == 2
        opened[1].log(5, FIGURES)
        opened[1].close()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    ids = {path.name.rsplit("-", 1)[1] for path in runs}
    assert ids == {(tmp_path / "wandb-id.txt").read_text()}  # the second one goes on with the first
    assert any(b"domain_loss/news" in file.read_bytes() for file in runs[0].glob("*.wandb"))
    shutil.rmtree(tmp_path / "wandb")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra")
def test_weights_and_biases_takes_the_steps_that_a_continued_run_does_again(
    pretrain_options, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = pretrain_options(tmp_path, logging=LoggingOptions(False, wandb_project="mixtures"))
    logger = open_loggers(options, 0)[1]
    assert isinstance(logger, WandbLogger)
    for step, loss in ((5, 3.0), (10, 2.0), (5, 1.0)):
        logger.log(step, {"loss": loss})
    last = dict(logger._run.summary)  # by wandb's own count it would be of step 10
    assert (last.get("step"), last.get("loss")) == (5, 1.0)
    logger.close()
    shutil.rmtree(tmp_path / "wandb")
