"""What lm-eval's own command makes of --model_args, and of mistakes in them."""

from __future__ import annotations

import lm_eval.__main__
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation import downstream
from megatron_chameleon.evaluation.lm_eval_model import CheckpointLM


@pytest.fixture
def model_args(text_checkpoint):
    """As lm-eval parses them, and what it adds by itself."""
    return {"checkpoint": str(text_checkpoint.checkpoint), "batch_size": "2", "device": "cuda:0"}


def test_lm_eval_finds_the_model_by_its_name():
    downstream.register_model()
    assert get_model("megatron_chameleon") is CheckpointLM


def test_a_model_is_opened_by_words(model_args):
    model = CheckpointLM.create_from_arg_obj(model_args)
    try:
        assert model.scorer.tokens_at_once == 2 * model.max_length
        ((score, _),) = model.loglikelihood([Instance("loglikelihood", {}, ("A", " lamp"), 0)])
        assert score < 0
        assert model.get_model_info()["model_num_parameters"] > 200_000
    finally:
        model.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "auto"}, "--batch_size auto: must be >= 1"),
        ({"batch_size": 0}, "--batch_size 0: must be >= 1"),
        ({"dtype": "float16"}, "dtype=float16: must be float32 or bfloat16"),
        ({"tensor_model_parallel_size": 2}, "start a multiple of 2"),
        ({"checkpoint": "nowhere"}, "neither a checkpoint nor a run with one"),
    ],
)
def test_mistakes_in_the_words_are_told(model_args, changes, message):
    with pytest.raises(UserError, match=message):
        CheckpointLM.create_from_arg_obj({**model_args, **changes})


def test_the_command_leaves_with_one_line_for_a_mistake(monkeypatch, capsys):
    def refuse():
        raise UserError("what is wrong; what to do")

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", refuse)
    with pytest.raises(SystemExit) as left:
        downstream.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: what is wrong; what to do\n"
