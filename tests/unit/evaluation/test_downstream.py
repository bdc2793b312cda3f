"""tools/evaluate.py downstream on one rank, from checkpoint and tasks to the result on disk."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
import socket
import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megatron_chameleon.artifacts.downstream_result import (
    DownstreamResult,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import evaluate_downstream, evaluate_part
from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.evaluation.tasks import TaskLibrary
from megatron_chameleon.options.tokenizer import TokenizerChoice
from tests.unit.evaluation.conftest import DOCUMENTS

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
def asked(monkeypatch):
    """The (task, shots) that are asked from here on."""
    parts = []

    def noting(model, loaded, settings):
        parts.append((settings.task, settings.shots))
        return evaluate_part(model, loaded, settings)

    monkeypatch.setattr("megatron_chameleon.evaluation.downstream.evaluate_part", noting)
    return parts


def test_figures_and_errors_are_those_of_lm_eval_with_the_exported_model(
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


def test_the_result_says_how_it_was_made(options):
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


def test_the_same_command_again_asks_nothing(options, asked):
    first = evaluate_downstream(options)
    assert asked == [("sciq", 0), ("sciq", 2), ("winogrande", 0), ("winogrande", 2)]
    asked.clear()
    again = evaluate_downstream(options)
    assert asked == []
    assert (again.tasks, again.cost) == (first.tasks, first.cost)


def test_more_tasks_and_shots_are_added_to_those_that_are_there(options, asked):
    first = evaluate_downstream(dataclasses.replace(options, tasks=("sciq",)))
    asked.clear()
    both = evaluate_downstream(dataclasses.replace(options, shots=(0, 1, 2)))
    assert asked == [("sciq", 1), ("winogrande", 0), ("winogrande", 1), ("winogrande", 2)]
    assert both.tasks["sciq"].by_shots[2] == first.tasks["sciq"].by_shots[2]
    assert both.cost.flops > first.cost.flops


def test_parts_of_another_evaluation_are_refused(options):
    evaluate_downstream(options)
    with pytest.raises(
        UserError, match=r"sciq-0shot\.json is of another evaluation: limit is None"
    ):
        evaluate_downstream(dataclasses.replace(options, limit=2))


def test_a_task_without_data_leaves_a_gap(options, task_data, tmp_path, capsys):
    some = tmp_path / "some-data"
    shutil.copytree(task_data / "allenai" / "winogrande", some / "allenai" / "winogrande")
    result = evaluate_downstream(dataclasses.replace(options, data_dir=some))
    table = capsys.readouterr().out
    assert list(result.tasks) == result.complete_tasks == ["winogrande"]
    (gap,) = result.gaps
    assert str(gap) == f"sciq: there is no {some}/allenai/sciq: put its data set there"
    assert table.count(str(gap)) == 2  # when it happens, and under the table
    assert "mean of 1 of 2 tasks" in table
    assert result.mean == result.tasks["winogrande"].mean
    mended = evaluate_downstream(options)
    assert mended.complete_tasks == ["sciq", "winogrande"]
    assert mended.gaps == []


def test_local_copies_need_no_hub(options, monkeypatch):
    calls = []

    def refuse(*address, **_more):
        calls.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert evaluate_downstream(options).complete_tasks == ["sciq", "winogrande"]
    assert calls == []


def test_a_data_set_that_is_a_program_is_told_with_the_way_out(options, tmp_path):
    folder = tmp_path / "hub" / "EleutherAI" / "logiqa"
    folder.mkdir(parents=True)
    (folder / "logiqa.py").write_text("raise SystemExit('it was run')\n")
    there = dataclasses.replace(options, data_dir=tmp_path / "hub", tasks=("logiqa",))
    program = "its repository on the hub is a program; pass copies of data sets by --data-dir"
    with pytest.raises(UserError, match=f"no task could be evaluated, .* logiqa: .*{program}"):
        evaluate_downstream(there)
    assert not options.output.exists()


def test_more_shots_than_documents_leave_a_gap_and_no_mean(options, capsys):
    result = evaluate_downstream(
        dataclasses.replace(options, shots=(0, DOCUMENTS + 1), tasks=("sciq",))
    )
    (gap,) = result.gaps
    assert (gap.task, gap.shots) == ("sciq", DOCUMENTS + 1)
    assert result.tasks["sciq"].by_shots.keys() == {0}
    assert result.tasks["sciq"].mean is None
    assert result.mean is None
    assert "mean of 0 of 1 tasks" in capsys.readouterr().out


def test_what_is_too_long_for_the_model_leaves_a_gap(options, task_data, tmp_path):
    data = Path(shutil.copytree(task_data / "allenai", tmp_path / "data" / "allenai")).parent
    path = data / "allenai" / "sciq" / "default" / "test.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "correct_answer": "a lamp " * 300})
    path.write_text("\n".join(lines))
    result = evaluate_downstream(dataclasses.replace(options, data_dir=data, shots=(0,)))
    (gap,) = result.gaps  # the copy is read, and not what was made of the first one
    assert str(gap).startswith("sciq, 0-shot: a continuation has")
    assert result.complete_tasks == ["winogrande"]


def test_what_the_model_fails_at_is_no_gap(options, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("megatron_chameleon.model.readout.Reader.final_hidden_states", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate_downstream(options)


def test_a_checkpoint_without_its_tokenizer_says_what_to_give(options, text_checkpoint, tmp_path):
    home, away = text_checkpoint.tokenizer.parent, tmp_path / "away"
    home.rename(away)
    try:
        with pytest.raises(UserError, match=r"no longer at .*; give it, .* --tokenizer-model"):
            evaluate_downstream(options)
        choice = TokenizerChoice(tokenizer_model=away / text_checkpoint.tokenizer.name)
        short = dataclasses.replace(options, tokenizer=choice, tasks=("sciq",), shots=(0,))
        assert evaluate_downstream(short).complete_tasks == ["sciq"]
    finally:
        away.rename(home)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("sciqq",)}, "--tasks sciqq: lm-eval has no such task; is it sciq"),
        ({"tasks": ("glue",)}, "--tasks glue: this is a group of tasks"),
        ({"tasks": ()}, "--tasks is empty"),
        ({"tasks": ("sciq", "sciq")}, "--tasks sciq sciq: one is given twice"),
        ({"shots": (-1,)}, "--shots -1: "),
        ({"data_dir": Path("nowhere")}, "--data-dir nowhere is not a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(options, changes, message):
    with pytest.raises(UserError, match=message):
        evaluate_downstream(dataclasses.replace(options, **changes))
    assert not options.output.parent.exists()


def test_without_lm_eval_the_tool_says_how_to_install_it(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    tool = runpy.run_path(str(TOOL))
    with pytest.raises(UserError, match=r"pip install 'megatron-chameleon\[eval\]'"):
        tool["downstream"](options)


@pytest.mark.parametrize(("task", "field"), [("race", "article"), ("lambada_openai", "text")])
def test_no_document_is_an_example_before_its_own_question(task, field, task_data):
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
