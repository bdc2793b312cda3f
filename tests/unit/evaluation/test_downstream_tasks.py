"""Which documents stand as examples before a question, by which splits a definition names."""

from __future__ import annotations

import datasets
import pytest
from lm_eval.api.task import ConfigurableTask

from megatron_chameleon.evaluation.downstream.tasks import keep_own_document_out

LEFT_OUT = ", the question's own document left out"


def documents(split):
    """Five that name their split."""
    rows = [{"text": f"{split} {number}", "label": number % 2} for number in range(5)]
    return datasets.Dataset.from_list(rows)


def custom_dataset(**_arguments):
    return {split: documents(split) for split in ("train", "validation", "test")}


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        ({"training_split": "train", "test_split": "test"}, "train"),
        ({"training_split": "train", "validation_split": "validation"}, "train"),
        ({"validation_split": "validation", "test_split": "test"}, "validation"),
        ({"test_split": "test"}, "test" + LEFT_OUT),
        ({"validation_split": "validation"}, "validation" + LEFT_OUT),
        ({"training_split": "test", "test_split": "test"}, "test" + LEFT_OUT),
        ({"validation_split": "test", "fewshot_split": "test"}, "test" + LEFT_OUT),
        ({"test_split": "test", "fewshot_split": "test"}, "test" + LEFT_OUT),
    ],
)
def test_a_question_is_never_its_own_example(splits, told):
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
    assert keep_own_document_out(task) == told
    task.set_fewshot_seed(seed=0)
    task.build_all_requests(rank=0, world_size=1)
    examples = told.removesuffix(LEFT_OUT)
    for request in task.instances:
        context = request.args[0]
        assert context.count(f"<{examples} ") >= 4
        assert context.count(f"<{request.doc['text']}>") == 1
