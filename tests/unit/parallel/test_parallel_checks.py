"""Layouts that cannot be, and the words in which they are refused."""

from __future__ import annotations

import re

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import model_size
from megatron_chameleon.options.parallel import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.parallel.layout import check_interleaving, check_layout, for_training


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            "interleaves pipeline stages; leave it out, or give --pipeline-model-parallel-size 2",
        ),
        ({"num_virtual_stages_per_pipeline_rank": 0}, "--num-virtual-stages-per-pipeline-rank 0: "),
        ({"overlap_param_gather": True}, "give --use-distributed-optimizer too"),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            "needs --overlap-grad-reduce",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        check_layout(TrainingParallelOptions(**options), 2)


def test_virtual_stages_have_to_divide_the_layers_of_a_stage():
    options = TrainingParallelOptions(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=4
    )
    with pytest.raises(UserError, match=r"4 does not divide the 6 layers .*; 1, 2, 3, 6 do"):
        check_model_layout(model_size("124m"), options, 1024)


def test_an_interleaved_step_has_groups_of_micro_batches():
    options = TrainingParallelOptions(
        pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=3
    )
    check_interleaving(options, 8)
    with pytest.raises(UserError, match=r"6 micro-batch.* not a multiple of .* 4; change --global"):
        check_interleaving(options, 6)
    check_interleaving(TrainingParallelOptions(pipeline_model_parallel_size=4), 6)


def test_a_layout_for_reading_has_what_training_has_at_its_defaults():
    reading = ParallelOptions(tensor_model_parallel_size=2, sequence_parallel=True)
    assert for_training(reading) == TrainingParallelOptions(2, sequence_parallel=True)
    training = TrainingParallelOptions(use_distributed_optimizer=True)
    assert for_training(training) is training
