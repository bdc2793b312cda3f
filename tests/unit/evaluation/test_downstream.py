"""tools/evaluate.py downstream and lm-eval's own command on one rank."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
import socket
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from scipy.stats import sem

from megatron_chameleon.artifacts.downstream_result import DownstreamResult, part_path
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import evaluate_downstream
from megatron_chameleon.evaluation.lm_eval_model import CheckpointLM
from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from megatron_chameleon.evaluation.tasks import TaskLibrary
from tests.distributed.launch import REPOSITORY, finish, kill_group, start
from tests.fixtures.task_data import write_task_data

DOCUMENTS = 8
SECONDS = 250.0


@pytest.fixture(scope="session")
def task_data(tmp_path_factory):
    """Folder with data sets, for --data-dir."""
    return write_task_data(tmp_path_factory.mktemp("tasks"), DOCUMENTS)


@pytest.fixture
def options(text_checkpoint, task_data, tmp_path):
    """Options of one evaluation of two tasks."""
    return DownstreamOptions(
        checkpoint=text_checkpoint.checkpoint,
        output=tmp_path / "6-evaluation" / "uniform.json",
        tasks=("sciq", "winogrande"),
        shots=(0, 2),
        data_dir=task_data,
    )


def modified(folder):
    """Return the modification times of the results of finished tasks."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}


# Whether a request (context, answer) scores the gold answer of a question.
IS_GOLD = {
    "sciq": lambda doc, _, answer: answer == f" {doc['correct_answer']}",
    "winogrande": lambda doc, context, _: context.endswith(
        doc["sentence"].split("_")[0] + doc[f"option{doc['answer']}"]
    ),
    "lambada_openai": lambda *_: True,  # the only request
}


def gold_bits(task, sample):
    """Bits per byte of the gold answer, from lm-eval's log of a question."""
    requests = sample["arguments"]
    gold = next(n for n, each in enumerate(requests) if IS_GOLD[task](sample["doc"], *each))
    ((log_likelihood, _),) = sample["resps"][gold]
    return -log_likelihood / math.log(2) / len(requests[gold][1].encode("utf-8"))


def test_scores_equal_lm_evals_with_the_exported_model(
    options, text_checkpoint, task_data, capsys, monkeypatch
):
    options = dataclasses.replace(options, tasks=(*options.tasks, "lambada_openai"))
    with monkeypatch.context() as offline:
        offline.setattr(socket.socket, "connect", None)  # any connection would fail
        result = evaluate_downstream(options)
    table = capsys.readouterr().out
    assert result.protocol.lm_eval_version.startswith("0.4.")
    assert result.cost.flops > 0
    theirs = HFLM(str(text_checkpoint.exported), device="cpu", dtype="float32", batch_size=8)
    library = TaskLibrary(options.tasks, task_data)
    means: list[np.ndarray] = []
    accs: list[np.floating] = []
    for task, metric in (("sciq", "acc_norm"), ("winogrande", "acc"), ("lambada_openai", "acc")):
        score, by_shots, acc_by_shots = result.tasks[task], [], []
        assert score.metric == metric
        for shots, found in score.by_shots.items():
            evaluated = simple_evaluate(
                model=theirs,
                tasks=[library.load(task).task],
                num_fewshot=shots,
                task_manager=TaskManager(include_defaults=False),
            )
            expected = evaluated["results"][task]
            bits = [gold_bits(task, sample) for sample in evaluated["samples"][task]]
            by_shots.append(bits)
            acc, error = score.unnormalized(found)
            acc_by_shots.append(expected["acc,none"])
            assert acc == expected["acc,none"]
            assert error == pytest.approx(expected["acc_stderr,none"])
            assert found.bits_per_byte == pytest.approx(np.mean(bits), abs=1e-6)
            assert found.bits_per_byte_error == pytest.approx(sem(bits), abs=1e-6)
            assert found.accuracy == expected[f"{metric},none"]
            assert found.standard_error == pytest.approx(expected[f"{metric}_stderr,none"])
            assert found.documents == DOCUMENTS
            assert f"{100 * found.accuracy:.2f}" in table
        means.append(np.mean(by_shots, axis=0))
        assert score.mean is not None
        assert score.mean.bits_per_byte == pytest.approx(means[-1].mean(), abs=1e-6)
        assert score.mean.bits_per_byte_error == pytest.approx(sem(means[-1]), abs=1e-6)
        assert f"{means[-1].mean():.4f}" in table
        accs.append(np.mean(acc_by_shots))
        mean_acc, _ = score.unnormalized(score.mean)
        assert mean_acc == pytest.approx(accs[-1])
        assert f"{100 * accs[-1]:.2f}" in table
        if task == "sciq":
            assert mean_acc != score.mean.accuracy  # so both metrics can be distinguished
    assert result.mean is not None
    assert result.mean.bits_per_byte == pytest.approx(np.mean(means), abs=1e-6)
    assert result.mean.acc == pytest.approx(np.mean(accs))
    assert DownstreamResult.load(options.output) == result


def test_tasks_that_cannot_be_evaluated_leave_gaps(options, task_data, tmp_path, capsys):
    data = tmp_path / "data" / "allenai"
    shutil.copytree(task_data / "allenai" / "sciq", data / "sciq")
    path = data / "sciq" / "default" / "test.jsonl"
    changed = dataclasses.replace(options, data_dir=data.parent, shots=(0, DOCUMENTS + 1))
    result = evaluate_downstream(changed)
    assert [(gap.task, gap.shots) for gap in result.gaps] == [
        ("sciq", DOCUMENTS + 1),
        ("winogrande", None),
    ]
    assert str(data / "winogrande") in result.gaps[1].reason
    assert list(result.tasks["sciq"].by_shots) == [0]
    assert result.tasks["sciq"].mean is None
    assert "mean of 0 of 2 tasks" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "correct_answer": "a lamp " * 300})
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"sciq-0shot\.json .*data is sha256:"):
        evaluate_downstream(changed)  # results on different data must not be combined
    again = dataclasses.replace(
        changed, output=tmp_path / "again.json", tasks=("sciq",), shots=(0,)
    )
    with pytest.raises(UserError, match=r"no task could be evaluated.*a continuation has"):
        evaluate_downstream(again)
    path.write_text("")  # like a file of an interrupted copy
    with pytest.raises(UserError, match=f"^no task could be evaluated.*{path} is empty[^\n]*$"):
        evaluate_downstream(again)
    shutil.copytree(task_data / "allenai" / "sciq", data / "sciq", dirs_exist_ok=True)
    whole = dataclasses.replace(options, tasks=("sciq",), shots=(0,))
    assert evaluate_downstream(whole).tasks["sciq"].by_shots == result.tasks["sciq"].by_shots


def test_code_in_a_data_set_is_not_run(options, tmp_path):
    folder = tmp_path / "hub" / "EleutherAI" / "logiqa"
    folder.mkdir(parents=True)
    (folder / "logiqa.py").write_text("raise SystemExit('it was run')\n")
    there = dataclasses.replace(options, data_dir=tmp_path / "hub", tasks=("logiqa",))
    with pytest.raises(UserError, match=r"logiqa: .*--data-dir"):
        evaluate_downstream(there)
    assert not options.output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": Path("nowhere")}, "--data-dir nowhere"),
        ({"output": Path("uniform")}, "uniform: "),
    ],
)
def test_invalid_options_are_rejected_before_the_evaluation(options, changes, message):
    with pytest.raises(UserError, match=message):
        evaluate_downstream(dataclasses.replace(options, **changes))
    assert not options.output.parent.exists()


def test_finished_parts_are_not_evaluated_again(options):
    only = dataclasses.replace(options, tasks=("sciq",))
    first = evaluate_downstream(only)
    finished = modified(only.parts_dir)
    assert finished.keys() == {"sciq-0shot.json", "sciq-2shot.json"}
    again = evaluate_downstream(only)
    assert (again.tasks, again.cost) == (first.tasks, first.cost)
    assert modified(only.parts_dir) == finished
    with pytest.raises(UserError, match=r"sciq-0shot\.json belongs to another evaluation: .*limit"):
        evaluate_downstream(dataclasses.replace(only, limit=2))
    both = evaluate_downstream(dataclasses.replace(options, shots=(0, 1, 2)))
    found = modified(only.parts_dir)
    assert len(found) == 6
    assert finished.items() <= found.items()
    assert both.tasks["sciq"].by_shots[2] == first.tasks["sciq"].by_shots[2]
    assert both.cost.flops > first.cost.flops


def test_an_error_of_the_model_ends_the_evaluation_instead_of_leaving_a_gap(options, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("megatron_chameleon.model.readout.Reader.final_hidden_states", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate_downstream(options)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Environment of processes that cannot reach the hub and have an empty cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_killed_evaluation_of_the_papers_tasks_resumes(environment, options, tmp_path):
    log, output = tmp_path / "log", options.output
    command = [sys.executable, str(REPOSITORY / "tools" / "evaluate.py"), "downstream"]
    command += ["--checkpoint", str(options.checkpoint), "--output", str(output)]
    command += ["--data-dir", str(options.data_dir), "--shots", "0", "1", "--limit", "4"]
    process = start(command, log)
    while not part_path(options.parts_dir, PAPER_TASKS[6], 0).exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)
    kill_group(process)
    finished = modified(options.parts_dir)
    assert 13 <= len(finished) < 26
    assert not output.exists()
    resumed = dataclasses.replace(options, tasks=PAPER_TASKS, shots=(0, 1), limit=4)
    result = evaluate_downstream(resumed)
    assert finished.items() <= modified(options.parts_dir).items()
    assert DownstreamResult.load(output) == result
    assert result.complete_tasks == list(PAPER_TASKS)
    assert result.gaps == []
    for score in result.tasks.values():
        assert score.mean is not None
        assert score.mean.bits_per_byte is not None
        assert [(shots, x.documents) for shots, x in score.by_shots.items()] == [(0, 4), (1, 4)]


@pytest.mark.slow  # lm-eval takes long to read its task definitions
def test_lm_evals_own_command_evaluates_a_checkpoint(environment, options, task_data, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    command = [sys.executable, "-m", "megatron_chameleon.evaluation.downstream", "run"]
    command += ["--model", "megatron_chameleon", "--tasks", "sciq", "--output_path", str(output)]
    command += ["--model_args", f"checkpoint={options.checkpoint}", "--batch_size", "4"]
    # Start in the folder of the data sets, since they are read from the working directory.
    assert finish(start(command, log, folder=task_data), SECONDS) == 0, log.read_text()
    (results,) = output.rglob("results_*.json")
    body = json.loads(results.read_text())
    assert body["config"]["model"] == "megatron_chameleon"
    assert body["n-samples"]["sciq"] == {"original": 8, "effective": 8}
    ours = evaluate_downstream(dataclasses.replace(options, tasks=("sciq",), shots=(0,)))
    accuracy = ours.tasks["sciq"].by_shots[0].accuracy
    assert body["results"]["sciq"]["acc_norm,none"] == accuracy


def test_checkpoint_is_opened_from_model_args(text_checkpoint):
    """Open a checkpoint and its Hugging Face folder by the arguments as lm-eval completes them."""
    scores = []
    for path in (text_checkpoint.checkpoint, text_checkpoint.exported):
        valid = {"checkpoint": str(path), "batch_size": "2", "device": "cuda:0"}
        model = CheckpointLM.create_from_arg_obj(valid)
        try:
            assert model.scorer.sequences_at_once == 2
            ((score, _),) = model.loglikelihood([Instance("loglikelihood", {}, ("A", " lamp"), 0)])
            scores.append(score)
        finally:
            model.close()
    assert scores[0] == scores[1] < 0
    closed = weakref.ref(model)
    del model
    gc.collect()
    assert closed() is None  # no handler at exit keeps the model and its process groups
    for changes in ({"batch_size": "auto"}, {"dtype": "float16"}, {"checkpoint": "nowhere"}):
        with pytest.raises(UserError, match=next(iter(changes.values()))):
            CheckpointLM.create_from_arg_obj(valid | changes)
