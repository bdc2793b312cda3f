"""Each repair of the distributed optimizer's loading does what it says.

That nothing goes on rightly without them is shown with two ranks, in tests/distributed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_chameleon.checkpoint.optimizer_fixes import (
    create_zero_state,
    load_into_own_steps,
    prepare_for_loading,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.optimizer import build_optimizer, data_parallel

SHAPE = ModelShape(ModelSize(1, 2, 16, 32), vocab_size=50, max_sequence_length=8)


@pytest.fixture
def optimizer(one_rank):
    """A fresh distributed optimizer: it has no state before its first step."""
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=True)
    model = data_parallel([build_model(SHAPE, layout, seed=1)], layout, bf16=False)
    (part,) = build_optimizer(model, OptimizerOptions(), layout, bf16=False).chained_optimizers
    assert not part.optimizer.state
    return part


def shards(optimizer):
    return [p for group in optimizer.optimizer.param_groups for p in group["params"]]


def main_parameter(optimizer, model_parameter):
    group, order = optimizer.model_param_group_index_map[model_parameter]
    return optimizer.optimizer.param_groups[group]["params"][order]


def loaded_tensors(shard, generator):
    return {
        name: torch.randn(shard.shape, generator=generator)
        for name in ("param", "exp_avg", "exp_avg_sq")
    }


def test_the_zero_state_is_that_of_step_0(optimizer):
    create_zero_state(optimizer)
    assert len(optimizer.optimizer.state) == len(shards(optimizer)) > 10
    for shard in shards(optimizer):
        state = optimizer.optimizer.state[shard]
        assert float(state["step"]) == 0.0
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            assert moment.shape == shard.shape
            assert not moment.any()


def test_a_state_that_is_there_is_kept(optimizer):
    create_zero_state(optimizer)
    first, *_, last = shards(optimizer)
    optimizer.optimizer.state[first]["exp_avg"].fill_(3.0)
    optimizer.optimizer.state[last] = {}
    create_zero_state(optimizer)
    assert (optimizer.optimizer.state[first]["exp_avg"] == 3.0).all()
    assert set(optimizer.optimizer.state[last]) == {"step", "exp_avg", "exp_avg_sq"}


def test_loaded_tensors_are_written_and_each_parameter_counts_for_itself(optimizer):
    create_zero_state(optimizer)
    shared_by_all = torch.tensor(7.0)  # as megatron leaves it
    for shard in shards(optimizer):
        optimizer.optimizer.state[shard]["step"] = shared_by_all
    load_into_own_steps(optimizer)
    generator = torch.Generator().manual_seed(0)
    for model_parameter in optimizer.model_param_group_index_map:
        shard = main_parameter(optimizer, model_parameter)
        tensors = loaded_tensors(shard, generator)
        optimizer._set_main_param_and_optimizer_states(model_parameter, tensors)
        state = optimizer.optimizer.state[shard]
        assert torch.equal(shard, tensors["param"])
        assert torch.equal(state["exp_avg"], tensors["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], tensors["exp_avg_sq"])
        state["step"] += 1
    steps = [optimizer.optimizer.state[shard]["step"] for shard in shards(optimizer)]
    assert [float(step) for step in steps] == [8.0] * len(steps)
    assert float(shared_by_all) == 7.0


def test_what_megatron_does_instead_fails(optimizer):
    """Should this fail after an update of megatron-core, the repair has become needless."""
    create_zero_state(optimizer)
    model_parameter, *_ = optimizer.model_param_group_index_map
    shard = main_parameter(optimizer, model_parameter)
    tensors = loaded_tensors(shard, torch.Generator())
    with pytest.raises(RuntimeError, match="modified inplace with grad mode enabled"):
        optimizer._set_main_param_and_optimizer_states(model_parameter, tensors)
    with torch.no_grad(), pytest.raises(KeyError, match="step"):
        optimizer._set_main_param_and_optimizer_states(model_parameter, tensors)


def test_one_optimizer_is_mended_and_not_the_class(optimizer):
    method = DistributedOptimizer._set_main_param_and_optimizer_states
    prepare_for_loading(optimizer)
    assert "_set_main_param_and_optimizer_states" in vars(optimizer)
    assert DistributedOptimizer._set_main_param_and_optimizer_states is method
    assert len(optimizer.optimizer.state) == len(shards(optimizer))
