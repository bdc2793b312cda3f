"""Task definitions: the splits of examples, and a hub that does not answer."""

from __future__ import annotations

import datasets
import pytest
from huggingface_hub import constants
from lm_eval.api.task import ConfigurableTask

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.tasks import TaskLibrary, exclude_own_document


def test_a_hub_that_does_not_answer_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    library = TaskLibrary(["sciq"], None)
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9 does not answer .*HF_HUB_OFFLINE=1"):
        library.check_hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    library.check_hub()


LEFT_OUT = ", the question's own document left out"


def documents(split):
    """Five documents that name their split."""
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
