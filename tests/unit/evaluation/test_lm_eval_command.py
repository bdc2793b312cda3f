"""lm-eval's command: --model_args and user mistakes."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.lm_eval_model import CheckpointLM


@pytest.fixture
def model_args(text_checkpoint):
    """Arguments as lm-eval parses and completes them."""
    return {"checkpoint": str(text_checkpoint.checkpoint), "batch_size": "2", "device": "cuda:0"}


def test_checkpoint_is_opened_from_model_args(model_args):
    model = CheckpointLM.create_from_arg_obj(model_args)
    try:
        assert model.scorer.sequences_at_once == 2
        ((score, _),) = model.loglikelihood([Instance("loglikelihood", {}, ("A", " lamp"), 0)])
        assert score < 0
        assert model.get_model_info()["model_num_parameters"] > 200_000
    finally:
        model.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "auto"}, "--batch_size auto"),
        ({"batch_size": 0}, "--batch_size 0"),
        ({"dtype": "float16"}, "dtype=float16"),
        ({"tensor_model_parallel_size": 2}, "2"),
        ({"checkpoint": "nowhere"}, "nowhere"),
    ],
)
def test_invalid_model_args_are_rejected(model_args, changes, message):
    with pytest.raises(UserError, match=message):
        CheckpointLM.create_from_arg_obj({**model_args, **changes})
