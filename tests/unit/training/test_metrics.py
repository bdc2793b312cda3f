"""Test the measurements of a log interval, and the loggers."""

from __future__ import annotations

import importlib.util
import json
import math
import time

import pytest
import torch

from megatron_chameleon.errors import UserError
from megatron_chameleon.training.metrics import (
    IntervalMeter,
    JsonLinesLogger,
    TensorBoardLogger,
    open_loggers,
)
from megatron_chameleon.training.options import LoggingOptions
from megatron_chameleon.training.step import StepResult
from tests.full_disk import largest_file_size

FIGURES = {
    "loss": 3.5,
    "domain_loss": {"news": 3.25, "ü": math.nan},
    "sampled_tokens": {"news": {"actual": 7, "target": 8}},
    "skipped": [{"step": 3, "reason": "the loss is nan", "domain_loss": {"a": math.inf}}],
}


def sums(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_interval_sums_its_steps(one_rank):
    meter = IntervalMeter(["a", "b", "c"], one_rank)
    meter.add(StepResult(sums([6.0, 2, 3], [0, 0, 0], [12.0, 2, 2]), grad_norm=0.5))
    meter.add(StepResult(sums([4.0, 2, 3], [0, 0, 0], [2.0, 2, 2]), grad_norm=0.25))
    skipped = StepResult(
        sums([math.nan, 2, 2], [3.0, 1, 4], [0, 0, 0]), math.inf, "the loss is nan"
    )
    meter.add(skipped)
    interval = meter.read()
    assert interval.loss == pytest.approx(24 / 8)
    assert interval.domain_loss == pytest.approx({"a": 10 / 4, "c": 14 / 4})
    assert interval.domain_tokens == {"a": 4, "c": 4}
    assert interval.domain_tokens_sampled == {"a": 8, "b": 4, "c": 4}
    assert interval.grad_norm == 0.25
    assert math.isnan(meter.read().loss)


def test_metrics_are_json_lines_that_survive_a_full_disk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    logger.log(1, FIGURES)
    with largest_file_size(path.stat().st_size + 5):
        for step in (2, 3):
            with pytest.raises(OSError, match=r"No space|too large"):
                logger.log(step, {"loss": 1.0})
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1
    logger.log(4, {"loss": math.nan})
    first, *later = path.read_text(encoding="utf-8").splitlines()
    line = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(line)[:2] == ["step", "loss"]
    assert line["domain_loss"] == {"news": 3.25, "ü": None}
    assert line["skipped"][0]["domain_loss"] == {"a": None}
    assert [json.loads(text)["step"] for text in later] == [2, 3, 4]
    assert json.loads(later[-1])["loss"] is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_survives_a_full_disk_and_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, 0)
    logger.log(1, FIGURES)

    def log_until_error():  # the writer's thread may report the error in a later call
        for _ in range(100):
            logger.log(2, {"loss": 2.0})

    def wait_for_the_next_second():
        # TensorBoard sorts the files of a process and second by a counter, as text: 10 before 9.
        opened = int(time.time())
        while int(time.time()) == opened:
            time.sleep(0.02)

    wait_for_the_next_second()
    with largest_file_size(10), pytest.raises(OSError, match=r"No space|too large"):
        log_until_error()
    for step in (3, 4, 5):
        logger.log(step, {"loss": float(step)})
    logger.close()
    wait_for_the_next_second()
    logger = TensorBoardLogger(tmp_path, first_step=3)
    logger.log(5, {"loss": 1.5})
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, 3.5), (3, 3.0), (5, 1.5)]
    assert [event.value for event in events.Scalars("domain_loss/news")] == [3.25]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra")
def test_wandb_run_continues_after_a_resume(pretrain_options, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = LoggingOptions(tensorboard=False, wandb_project="mixtures")
    options = pretrain_options(tmp_path, logging=logging)
    for steps in ((5, 10), (5,)):
        _, logger = open_loggers(options, 0)
        for step in steps:
            logger.log(step, FIGURES)
        summary = dict(logger._run.summary)  # type: ignore[union-attr]
        assert summary.get("step") == steps[-1]
        logger.close()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    ids = {path.name.rsplit("-", 1)[1] for path in runs}
    assert ids == {(tmp_path / "wandb-id.txt").read_text()}
    assert any(b"domain_loss/news" in file.read_bytes() for file in runs[0].glob("*.wandb"))


def test_mlflow_run_continues_after_a_resume(pretrain_options, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    # Of the stores on disk, mlflow-skinny has only the one of files.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    logging = LoggingOptions(tensorboard=False, mlflow_experiment="mixtures")
    options = pretrain_options(tmp_path / "run", logging=logging, train_iters=15)
    client = MlflowClient()
    many = {f"{'../' * (i % 3)}domain<{i}>": float(i) for i in range(1200)}
    for steps in ((5, 10), (15,)):
        _, logger = open_loggers(options, 0)
        for step in steps:
            logger.log(step, {**FIGURES, "validation_loss": many})
        logger.close()
        run_id = (options.run_dir / "mlflow-id.txt").read_text()
        status = client.get_run(run_id).info.status
        assert status == ("FINISHED" if steps[-1] == 15 else "KILLED")
    [run] = client.search_runs([client.get_experiment_by_name("mixtures").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.info.run_id == (options.run_dir / "mlflow-id.txt").read_text()
    assert run.data.params["optimizer/lr"] == "0.01"
    assert run.data.metrics["domain_loss/news"] == 3.25
    assert sum(name.startswith("validation_loss/") for name in run.data.metrics) == 1200
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == [(n, 3.5) for n in (5, 10, 15)]
    client.delete_run(run.info.run_id)
    with pytest.raises(UserError, match=r"MLflow: .*mlflow-id\.txt"):
        open_loggers(options, 0)
    with pytest.raises(OSError, match="MLflow"):
        logger.log(20, FIGURES)
