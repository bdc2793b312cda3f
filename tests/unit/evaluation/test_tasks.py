"""Task definitions: the split of few-shot examples, and a hub that does not answer."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

import datasets
import pytest
from huggingface_hub import close_session, constants
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.tasks import (
    HUB_ATTEMPTS,
    TaskLibrary,
    TaskUnavailableError,
    all_tasks,
    exclude_own_document,
)


def test_unreachable_hub_makes_tasks_unavailable(monkeypatch, tmp_path):
    calls = []

    def refuse(*address, **_more):
        calls.append(address)
        raise OSError("there is no network")

    hub = "http://127.0.0.1:9"
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    template = hub + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    close_session()
    try:
        library = TaskLibrary(["sciq", "piqa"], None)
        for task in ("sciq", "piqa"):
            with pytest.raises(TaskUnavailableError, match=r"does not answer.*--data-dir"):
                library.load(task)
    finally:
        close_session()
    assert len(calls) == HUB_ATTEMPTS


@pytest.fixture
def few_definitions(monkeypatch):
    """Let lm-eval's index have some of its folders, because reading all of them takes seconds."""
    root = Path(lm_eval_tasks.__file__).parent
    folders = [root / "arc", root / "mmlu/default"]
    few = functools.partial(TaskManager, include_defaults=False, include_path=folders)
    monkeypatch.setattr("megatron_chameleon.evaluation.tasks.TaskManager", few)
    all_tasks.cache_clear()
    yield
    all_tasks.cache_clear()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("ai2_arc", "a group; name its tasks: arc_challenge arc_easy$"),
        ("mmlu", "a group; name its tasks: mmlu_abstract_algebra .* mmlu_world_religions$"),
        ("no_such_task", "unknown task"),
    ],
)
def test_a_group_is_rejected_with_the_names_of_its_tasks(few_definitions, name, named):
    with pytest.raises(UserError, match=f"^--tasks {name}: {named}"):
        TaskLibrary(["arc_easy", name], None)
    assert all_tasks() is all_tasks()


LEFT_OUT = ", the question's own document left out"


def documents(split):
    """Return five documents that name their split."""
    rows = [{"text": f"{split} {number}", "label": number % 2} for number in range(5)]
    return datasets.Dataset.from_list(rows)


def custom_dataset(**_arguments):
    return {split: documents(split) for split in ("train", "validation", "test")}


@pytest.mark.parametrize(
    ("splits", "source"),
    [
        ({"training_split": "train", "test_split": "test"}, "train"),
        ({"test_split": "test"}, "test" + LEFT_OUT),
        ({"validation_split": "test", "fewshot_split": "test"}, "test" + LEFT_OUT),
    ],
)
def test_question_is_never_its_own_example(splits, source):
    task = ConfigurableTask(
        config={
            "task": "made_up",
            "custom_dataset": custom_dataset,
            "output_type": "multiple_choice",
            "doc_to_text": "<{{text}}>",
            "doc_to_target": "label",
            "doc_to_choice": ["no", "yes"],
            "num_fewshot": 4,
            **splits,
        }
    )
    assert exclude_own_document(task) == source
    task.set_fewshot_seed(seed=0)
    task.build_all_requests(rank=0, world_size=1)
    examples = source.removesuffix(LEFT_OUT)
    for request in task.instances:
        context = request.args[0]
        assert context.count(f"<{examples} ") >= 4
        assert context.count(f"<{request.doc['text']}>") == 1
