"""Random generators through a checkpoint, on one rank."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.index import read_index
from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import (
    loadable_random_states,
    model_state,
    random_states,
    set_random_states,
    training_state,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from tests.unit.checkpoint.test_checkpoint_round_trip import OPTIONS, SHAPE, record_at, train


@pytest.fixture
def trainer(one_rank):
    model = data_parallel([build_model(SHAPE, one_rank, seed=1)], one_rank, bf16=False)
    optimizer = build_optimizer(model, OPTIONS, one_rank, bf16=False)
    trainer = model, optimizer, build_scheduler(optimizer, OPTIONS, train_iters=10)
    train(trainer, 1, 1)
    return trainer


def draw():
    """The next numbers of the default generator, and of megatron's within tensor parallelism."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3)
    return torch.cat([torch.rand(3), tracked])


def test_the_generators_go_on_where_they_were(trainer, tmp_path):
    torch.manual_seed(17)
    draw()
    state = training_state(*trainer, is_loading=False)
    save_checkpoint(state, record_at(tmp_path / "step"))
    expected = draw()
    assert not torch.equal(draw(), expected)
    load_training(CheckpointRecord.load(tmp_path / "step"), *trainer)
    assert torch.equal(draw(), expected)


def test_a_checkpoint_without_them_leaves_them_as_they_are(trainer, tmp_path):
    state = training_state(*trainer, is_loading=False)
    del state["random"]
    save_checkpoint(state, record_at(tmp_path / "step"))
    before = random_states()
    load_training(CheckpointRecord.load(tmp_path / "step"), *trainer)
    assert random_states().keys() == before.keys()
    assert all(torch.equal(state, before[name]) for name, state in random_states().items())


def test_only_what_fits_is_asked_for(one_rank, trainer, tmp_path):
    """As from a device whose generator has another state."""
    state = training_state(*trainer, is_loading=False)
    name = next(name for name in state["random"] if name.startswith("mp."))
    key = state["random"][name].key
    state["random"][name] = type(state["random"][name]).from_rank_offsets(
        key, torch.zeros(16, dtype=torch.uint8)
    )
    save_checkpoint(state, record_at(tmp_path / "step"))
    found = loadable_random_states(read_index(tmp_path / "step"))
    assert set(found) == set(random_states()) - {name}
    save_checkpoint(model_state(trainer[0]), record_at(tmp_path / "weights"))
    assert loadable_random_states(read_index(tmp_path / "weights")) == {}


def test_some_of_them_can_be_set(one_rank):
    states = random_states()
    expected = draw()
    set_random_states({name: state for name, state in states.items() if name != "cuda"})
    assert torch.equal(draw(), expected)
