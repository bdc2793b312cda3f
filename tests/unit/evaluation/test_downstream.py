"""tools/evaluate.py downstream and lm-eval's own command on one rank."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megatron_chameleon.artifacts.downstream_result import (
    DownstreamResult,
    PartSettings,
    part_path,
)
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import (
    DownstreamPlan,
    evaluate_downstream,
    evaluate_part,
)
from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from megatron_chameleon.evaluation.tasks import TaskLibrary
from tests.distributed.launch import REPOSITORY, finish, kill_group, start
from tests.fixtures.task_data import write_task_data
from tests.unit.evaluation.conftest import DOCUMENTS

SECONDS = 250.0
TOOL = Path(__file__).parents[3] / "tools" / "evaluate.py"


@pytest.fixture
def options(text_checkpoint, task_data, tmp_path):
    """One evaluation of two tasks."""
    return DownstreamOptions(
        checkpoint=text_checkpoint.checkpoint,
        output=tmp_path / "6-evaluation" / "uniform.json",
        tasks=("sciq", "winogrande"),
        shots=(0, 2),
        data_dir=task_data,
    )


@pytest.fixture
def one_task(options):
    """One task without examples."""
    return dataclasses.replace(options, tasks=("sciq",), shots=(0,))


@pytest.fixture
def evaluated(monkeypatch):
    """The (task, shots) evaluated so far."""
    parts = []

    def noting(model, loaded, settings):
        parts.append((settings.task, settings.shots))
        return evaluate_part(model, loaded, settings)

    monkeypatch.setattr("megatron_chameleon.evaluation.downstream.evaluate_part", noting)
    return parts


def test_accuracies_equal_lm_evals_with_the_exported_model(
    options, text_checkpoint, task_data, capsys
):
    result = evaluate_downstream(options)
    table = capsys.readouterr().out
    theirs = HFLM(str(text_checkpoint.exported), device="cpu", dtype="float32", batch_size=8)
    library = TaskLibrary(options.tasks, task_data)
    for task, metric in (("sciq", "acc_norm"), ("winogrande", "acc")):
        score = result.tasks[task]
        assert score.metric == metric
        for shots, found in score.by_shots.items():
            expected = simple_evaluate(
                model=theirs,
                tasks=[library.load(task).task],
                num_fewshot=shots,
                task_manager=TaskManager(include_defaults=False),
            )["results"][task]
            assert found.accuracy == expected[f"{metric},none"]
            assert found.standard_error == pytest.approx(expected[f"{metric}_stderr,none"])
            assert found.documents == DOCUMENTS
            assert f"{100 * found.accuracy:.2f}" in table
    assert DownstreamResult.load(options.output) == result


def test_result_records_protocol_and_cost(options):
    result = evaluate_downstream(dataclasses.replace(options, limit=3, shots=(1, 0)))
    assert result.protocol == dataclasses.replace(
        result.protocol, shots=[0, 1], limit=3, fewshot_seed=1234, dtype="float32"
    )
    assert result.protocol.lm_eval_version.startswith("0.4.")
    assert result.tasks["sciq"].version == "1.0"
    assert result.tasks["sciq"].shots_from == "train"
    assert result.tasks["sciq"].by_shots[1].documents == 3
    hashes = [x.requests_hash for task in result.tasks.values() for x in task.by_shots.values()]
    assert len(set(hashes)) == 4
    assert result.cost.flops > 0
    assert result.cost.device_seconds == pytest.approx(result.cost.wall_seconds)
    assert result.provenance.inputs.keys() == {"checkpoint", "tokenizer"}


def test_finished_parts_are_not_evaluated_again(options, evaluated):
    only = dataclasses.replace(options, tasks=("sciq",))
    first = evaluate_downstream(only)
    assert evaluated == [("sciq", 0), ("sciq", 2)]
    evaluated.clear()
    again = evaluate_downstream(only)
    assert evaluated == []
    assert (again.tasks, again.cost) == (first.tasks, first.cost)
    with pytest.raises(UserError, match=r"sciq-0shot\.json is of another evaluation: .*limit"):
        evaluate_downstream(dataclasses.replace(only, limit=2))
    both = evaluate_downstream(dataclasses.replace(options, shots=(0, 1, 2)))
    assert evaluated == [("sciq", 1), ("winogrande", 0), ("winogrande", 1), ("winogrande", 2)]
    assert both.tasks["sciq"].by_shots[2] == first.tasks["sciq"].by_shots[2]
    assert both.cost.flops > first.cost.flops


def test_task_without_data_leaves_a_gap(options, task_data, tmp_path, capsys):
    some = tmp_path / "some-data"
    shutil.copytree(task_data / "allenai" / "winogrande", some / "allenai" / "winogrande")
    result = evaluate_downstream(dataclasses.replace(options, data_dir=some))
    table = capsys.readouterr().out
    assert list(result.tasks) == result.complete_tasks == ["winogrande"]
    (gap,) = result.gaps
    assert gap.task == "sciq"
    assert str(some / "allenai/sciq") in gap.reason
    assert table.count(str(gap)) == 2  # when it happens, and below the table
    assert "mean of 1 of 2 tasks" in table
    assert result.mean == result.tasks["winogrande"].mean
    complete = evaluate_downstream(options)
    assert complete.complete_tasks == ["sciq", "winogrande"]
    assert complete.gaps == []


def test_local_copies_need_no_hub(options, monkeypatch):
    calls = []

    def refuse(*address, **_more):
        calls.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert evaluate_downstream(options).complete_tasks == ["sciq", "winogrande"]
    assert calls == []


def test_data_set_script_is_rejected(options, tmp_path):
    folder = tmp_path / "hub" / "EleutherAI" / "logiqa"
    folder.mkdir(parents=True)
    (folder / "logiqa.py").write_text("raise SystemExit('it was run')\n")
    there = dataclasses.replace(options, data_dir=tmp_path / "hub", tasks=("logiqa",))
    with pytest.raises(UserError, match=r"logiqa: .*--data-dir"):
        evaluate_downstream(there)
    assert not options.output.exists()


def test_more_shots_than_documents_leave_a_gap(options, capsys):
    result = evaluate_downstream(
        dataclasses.replace(options, shots=(0, DOCUMENTS + 1), tasks=("sciq",))
    )
    (gap,) = result.gaps
    assert (gap.task, gap.shots) == ("sciq", DOCUMENTS + 1)
    assert result.tasks["sciq"].by_shots.keys() == {0}
    assert result.tasks["sciq"].mean is None
    assert result.mean is None
    assert "mean of 0 of 1 tasks" in capsys.readouterr().out


def test_continuation_longer_than_the_model_leaves_a_gap(options, task_data, tmp_path):
    data = Path(shutil.copytree(task_data / "allenai", tmp_path / "data" / "allenai")).parent
    path = data / "allenai" / "sciq" / "default" / "test.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "correct_answer": "a lamp " * 300})
    path.write_text("\n".join(lines))
    result = evaluate_downstream(dataclasses.replace(options, data_dir=data, shots=(0,)))
    (gap,) = result.gaps  # the copy is read, not the cached original
    assert str(gap).startswith("sciq, 0-shot: a continuation has")
    assert result.complete_tasks == ["winogrande"]


def test_failure_of_the_model_is_not_a_gap(options, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("megatron_chameleon.model.readout.Reader.final_hidden_states", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate_downstream(options)


def test_missing_tokenizer_can_be_passed(options, text_checkpoint, tmp_path):
    home, away = text_checkpoint.tokenizer.parent, tmp_path / "away"
    home.rename(away)
    try:
        with pytest.raises(UserError, match="--tokenizer-model"):
            evaluate_downstream(options)
        choice = TokenizerChoice(tokenizer_model=away / text_checkpoint.tokenizer.name)
        short = dataclasses.replace(options, tokenizer=choice, tasks=("sciq",), shots=(0,))
        assert evaluate_downstream(short).complete_tasks == ["sciq"]
    finally:
        away.rename(home)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("sciqq",)}, "--tasks sciqq: "),
        ({"tasks": ("glue",)}, "--tasks glue: "),
        ({"tasks": ()}, "--tasks is empty"),
        ({"tasks": ("sciq", "sciq")}, "--tasks sciq sciq"),
        ({"shots": (-1,)}, "--shots -1: "),
        ({"data_dir": Path("nowhere")}, "--data-dir nowhere"),
    ],
)
def test_mistakes_are_rejected_before_evaluation(options, changes, message):
    with pytest.raises(UserError, match=message):
        evaluate_downstream(dataclasses.replace(options, **changes))
    assert not options.output.parent.exists()


def test_missing_lm_eval_is_reported(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    tool = runpy.run_path(str(TOOL))
    with pytest.raises(UserError, match=r"pip install 'megatron-chameleon\[eval\]'"):
        tool["downstream"](options)


@pytest.mark.parametrize(("task", "field"), [("race", "article"), ("lambada_openai", "text")])
def test_document_is_no_example_of_its_own_question(task, field, task_data):
    loaded = TaskLibrary([task], task_data).load(task)
    assert loaded.shots_from == "test, the question's own document left out"
    loaded.set_shots(5, seed=0)
    loaded.task.build_all_requests(rank=0, world_size=1)
    contexts = {request.doc_id: request.args[0] for request in loaded.task.instances}
    assert len(contexts) == DOCUMENTS
    # The last word is what LAMBADA asks for.
    texts = [document[field].rsplit(" ", 1)[0] for document in loaded.task.eval_docs]
    for doc_id, context in contexts.items():
        assert context.count(texts[doc_id]) == 1
        assert sum(text in context for text in texts) == 1 + 5


@pytest.fixture
def other_data(tmp_path):
    """Copies with more questions."""
    return write_task_data(tmp_path / "other", DOCUMENTS + 1)


def test_parts_of_other_data_are_rejected(one_task, other_data):
    evaluate_downstream(one_task)
    elsewhere = dataclasses.replace(one_task, data_dir=other_data)
    with pytest.raises(UserError, match=r"sciq-0shot\.json is of another .*data is sha256:"):
        evaluate_downstream(elsewhere)
    with pytest.raises(UserError, match="data is sha256"):
        evaluate_downstream(dataclasses.replace(one_task, data_dir=None))


def test_moved_copy_is_the_same_data(one_task, task_data, tmp_path):
    first = evaluate_downstream(one_task)
    moved = Path(shutil.copytree(task_data, tmp_path / "moved"))
    (moved / "allenai" / "sciq" / ".cache").mkdir()
    (moved / "allenai" / "sciq" / ".cache" / "downloaded.metadata").write_text("at noon")
    assert evaluate_downstream(dataclasses.replace(one_task, data_dir=moved)).tasks == first.tasks


def test_other_configurations_of_a_data_set_do_not_matter(task_data, tmp_path):
    some = Path(shutil.copytree(task_data, tmp_path / "some"))
    before = TaskLibrary(["copa", "multirc"], some)
    known = [before.data_of(task) for task in ("copa", "multirc")]
    (some / "aps" / "super_glue" / "multirc" / "train.jsonl").write_text("{}\n")
    after = TaskLibrary(["copa", "multirc"], some)
    assert after.data_of("copa") == known[0]
    assert after.data_of("multirc") != known[1]


def test_parts_are_kept_without_their_data(one_task, tmp_path):
    first = evaluate_downstream(one_task)
    (tmp_path / "logiqa-alone").mkdir()
    again = dataclasses.replace(one_task, data_dir=tmp_path / "logiqa-alone")
    assert evaluate_downstream(again).tasks == first.tasks


def test_data_that_changed_between_shots_leaves_a_gap(one_task, other_data, monkeypatch, capsys):
    """As if a data set changed on the hub, where its hash is unknown."""
    both = dataclasses.replace(one_task, tasks=("sciq", "winogrande"))
    evaluate_downstream(both)
    settings = DownstreamPlan.settings

    def of_the_hub(self, task, shots):
        known: PartSettings = settings(self, task, shots)
        return dataclasses.replace(known, data=None)

    monkeypatch.setattr(DownstreamPlan, "settings", of_the_hub)
    shutil.rmtree(other_data / "allenai" / "winogrande")
    shutil.copytree(
        one_task.data_dir / "allenai" / "winogrande", other_data / "allenai" / "winogrande"
    )
    result = evaluate_downstream(dataclasses.replace(both, data_dir=other_data, shots=(0, 1)))
    (gap,) = result.gaps
    assert gap.task == "sciq"
    assert "differ between numbers of shots" in gap.reason
    assert str(one_task.output.with_suffix("") / "sciq-*shot.json") in gap.reason
    assert result.complete_tasks == ["winogrande"]
    assert "mean of 1 of 2 tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uniform", "uniform: "),
        ("folder.json", "folder.json is a folder"),
        ("mixture.json", "mixture.json .*'mixture'"),
        ("mixture.json/uniform.json", "mixture.json cannot be written to"),
        ("notes.json", r"--work-dir \S+/notes: .* cannot be written to; choose another folder"),
    ],
)
def test_unwritable_output_is_rejected_at_once(one_task, tmp_path, name, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "mixture.json").write_text(json.dumps({"kind": "mixture"}))
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(UserError, match=message):
        evaluate_downstream(dataclasses.replace(one_task, output=tmp_path / name))
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["folder.json", "mixture.json", "notes"]


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Processes without a hub and with an empty cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


NORMALISED = {"arc_easy", "hellaswag", "logiqa", "openbookqa", "piqa", "sciq"}


def wait_for(path, process, log):
    while not path.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)


def test_killed_evaluation_of_the_papers_tasks_resumes(
    environment, text_checkpoint, task_data, tmp_path
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


def test_lm_eval_command_line(environment, text_checkpoint, task_data, tmp_path):
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
