"""The commands as processes: the thirteen tasks, a run that is killed, lm-eval's own command."""

from __future__ import annotations

import json
import sys
import time

import pytest

from megatron_chameleon.artifacts.downstream_part import part_path
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.evaluation.downstream import evaluate_downstream
from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from tests.distributed.launch import REPOSITORY, finish, kill_group, start

SECONDS = 250.0
NORMALISED = {"arc_easy", "hellaswag", "logiqa", "openbookqa", "piqa", "sciq"}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """What the processes get from here: no hub, and a cache of their own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def wait_for(path, process, log):
    while not path.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)


def test_all_tasks_of_the_paper_by_a_run_that_is_killed_in_the_seventh(
    text_checkpoint, task_data, tmp_path
):
    output, work_dir, log = tmp_path / "result.json", tmp_path / "result", tmp_path / "log"
    command = [sys.executable, str(REPOSITORY / "tools" / "evaluate.py"), "downstream"]
    command += ["--checkpoint", str(text_checkpoint.checkpoint), "--output", str(output)]
    command += ["--data-dir", str(task_data), "--shots", "0", "1", "--limit", "4"]

    process = start(command, log)
    wait_for(part_path(work_dir, PAPER_TASKS[6], 0), process, log)
    kill_group(process)
    finished = {path: path.stat().st_mtime_ns for path in work_dir.glob("*.json")}
    assert 13 <= len(finished) < 26
    assert not output.exists()

    assert finish(start(command, log), SECONDS) == 0, log.read_text()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    result = DownstreamResult.load(output)
    assert result.complete_tasks == list(PAPER_TASKS)
    assert result.gaps == []
    for task, score in result.tasks.items():
        assert score.metric == ("acc_norm" if task in NORMALISED else "acc")
        assert [(shots, x.documents) for shots, x in score.by_shots.items()] == [(0, 4), (1, 4)]
    assert "mean of 13 of 13 tasks" in log.read_text()


def test_lm_eval_s_own_command_knows_the_model(text_checkpoint, task_data, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    command = [sys.executable, "-m", "megatron_chameleon.evaluation.downstream", "run"]
    command += ["--model", "megatron_chameleon", "--tasks", "sciq", "--output_path", str(output)]
    command += ["--model_args", f"checkpoint={text_checkpoint.checkpoint}", "--batch_size", "4"]
    # It finds copies of the data in its folder.
    assert finish(start(command, log, folder=task_data), SECONDS) == 0, log.read_text()
    (results,) = output.rglob("results_*.json")
    body = json.loads(results.read_text())
    assert body["config"]["model"] == "megatron_chameleon"
    assert body["n-samples"]["sciq"] == {"original": 8, "effective": 8}
    ours = evaluate_downstream(
        DownstreamOptions(
            checkpoint=text_checkpoint.checkpoint,
            output=tmp_path / "ours.json",
            tasks=("sciq",),
            shots=(0,),
            data_dir=task_data,
        )
    )
    accuracy = ours.tasks["sciq"].by_shots[0].accuracy
    assert body["results"]["sciq"]["acc_norm,none"] == accuracy
