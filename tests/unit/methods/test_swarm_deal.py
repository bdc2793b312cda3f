"""How members are dealt to groups and ranks, and how many fit at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.methods.swarm.deal import Job, dealt, even_groups
from megatron_chameleon.methods.swarm.group import own_losses
from megatron_chameleon.methods.swarm.memory import (
    TOKENS_ON_CPU,
    TOKENS_ON_GPU,
    PassSize,
    kept_elements,
    largest_divisor,
    pass_size,
    state_bytes,
)
from megatron_chameleon.methods.swarm.plan import plan_swarm
from megatron_chameleon.methods.swarm.stacked_gpt import (
    StackedGPT,
    hidden_states,
    initial_weights,
)
from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size
from megatron_chameleon.options.swarm import SwarmOptions

GB = 10**9


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 9))
def test_groups_hold_every_member_once_and_are_as_few_and_even_as_can_be(count, at_once, ranks):
    groups = even_groups(range(count), at_once, ranks)
    assert [member for group in groups for member in group] == list(range(count))
    sizes = [len(group) for group in groups]
    if count:
        assert max(sizes) <= at_once
        assert max(sizes) - min(sizes) <= 1
        rounds = -(-len(groups) // ranks)
        assert rounds == -(-count // (at_once * ranks))


def job(members, steps_left):
    return Job(Path(f"{members[0]}"), members, 1, 100 - steps_left, steps_left)


def test_the_rank_with_least_to_do_gets_the_next_job():
    jobs = [job((0,), 10), job((1, 2), 100), job((3, 4), 90), job((5,), 30)]
    hands = dealt(jobs, 2)
    assert [[each.members for each in hand] for hand in hands] == [
        [(1, 2), (0,)],
        [(3, 4), (5,)],
    ]
    assert dealt([], 3) == [[], [], []]


@pytest.fixture
def plan(corpus):
    def make(count=512, **changes):
        return plan_swarm(SwarmOptions(**changes), corpus, np.tile([0.2, 0.3, 0.5], (count, 1)))

    return make


def test_passes_are_as_large_as_the_device_needs_where_memory_allows(plan):
    made = plan(seq_length=32, eval_tokens=640)
    on_gpu = pass_size(made, 10_000 * GB, on_gpu=True)
    assert on_gpu == PassSize(512, largest_divisor(512, TOKENS_ON_GPU // (512 * 32)))
    on_cpu = pass_size(made, 10_000 * GB, on_gpu=False)
    assert on_cpu == PassSize(TOKENS_ON_CPU // 32, 1)


def test_little_memory_means_fewer_members(plan):
    made = plan(seq_length=32, eval_tokens=640)
    of_member = state_bytes(made.shape, bf16=False)
    sizes = [pass_size(made, int(3 * GB + n * of_member), on_gpu=True).members for n in (0, 9, 90)]
    assert 1 <= sizes[0] < sizes[1] < sizes[2] < 90


def test_what_is_asked_for_is_taken(plan):
    made = plan(seq_length=32, eval_tokens=640, members_at_once=7, micro_batch_size=16)
    assert pass_size(made, 1, on_gpu=True) == PassSize(7, 16)
    assert pass_size(plan(3), 100 * GB, on_gpu=True).members == 3


def test_a_state_is_what_a_stack_and_its_moments_hold():
    shape = ModelShape(model_size("1m"), 50_257, 2048)
    count = shape.num_parameters + 47 * 256
    assert state_bytes(shape, bf16=False) == 16 * count
    assert state_bytes(shape, bf16=True) == 18 * count


@pytest.mark.parametrize("size", [ModelSize(2, 4, 32, 64), ModelSize(3, 2, 16, 64)])
def test_activations_are_estimated_as_autograd_keeps_them(size):
    shape = ModelShape(size, 251, 64)
    stacked = StackedGPT(shape, initial_weights(shape, (0, 1), torch.device("cpu")), bf16=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in stacked.weights.values()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = 3 * 64
    embedded = torch.randn(2, tokens, size.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = hidden_states(stacked.weights, shape, embedded, 64)
    measured = sum(size for size, _ in kept.values()) / (2 * tokens * 4)
    assert hidden.requires_grad
    assert measured <= kept_elements(shape) <= 1.25 * measured


def test_a_member_is_judged_by_the_domains_that_it_is_trained_on():
    mixtures = np.array([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    losses = np.array([[1.0, 50.0, np.nan], [2.0, 4.0, np.nan], [3.0, 5.0, np.nan]])
    measured = np.array([True, True, False])
    found = own_losses(losses, mixtures, measured)
    np.testing.assert_allclose(found, [1.0, (0.5 * 2 + 0.25 * 4) / 0.75, 4.0])
    losses[1, 0] = np.nan
    assert np.isnan(own_losses(losses, mixtures, measured)).tolist() == [False, True, False]
