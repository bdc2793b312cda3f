"""State behind the padding of a gradient bucket is saved where it belongs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_chameleon.checkpoint.optimizer_fixes import gather_with_padding
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training import optimizer as optimizers

# Widths at which parameters do not end at a bucket's end.
SHAPE = ModelShape(ModelSize(2, 2, 36, 72), vocab_size=100, max_sequence_length=16)


@pytest.fixture
def optimizer(one_rank, monkeypatch):
    """A sharded optimizer of several buckets, whose moments tell its parameters apart."""

    def with_small_buckets(**settings):
        return DistributedDataParallelConfig(**settings, bucket_size=3000)

    monkeypatch.setattr(optimizers, "DistributedDataParallelConfig", with_small_buckets)
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = optimizers.data_parallel([build_model(SHAPE, layout, seed=1)], layout, bf16=False)
    chained = optimizers.build_optimizer(model, OptimizerOptions(), layout, bf16=False)
    (part,) = chained.chained_optimizers
    for number, shard in enumerate(p for g in part.optimizer.param_groups for p in g["params"]):
        part.optimizer.state[shard] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(shard, number + 1.0),
            "exp_avg_sq": torch.full_like(shard, number + 0.5),
        }
    return part


def misplaced(optimizer):
    """Parameters of which the gathered state at their place in the buffer is not their own."""
    state = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    wrong = 0
    for number, buffer in enumerate(optimizer.buffers):
        (tensors,) = state[number].values()
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            own = optimizer._get_main_param_and_optimizer_states(parameter)
            for key in ("param", "exp_avg", "exp_avg_sq"):
                found = tensors[key][start:stop]
                wrong += not torch.equal(found, own[key].flatten())
    return wrong


def test_megatron_alone_misplaces_what_lies_behind_padding(optimizer):
    """Should this fail after an update of megatron-core, the repair has become needless."""
    assert len(optimizer.buffers[0].buckets) > 2
    assert misplaced(optimizer) > 0


def test_with_the_repair_every_parameter_is_in_its_place(optimizer):
    gather_with_padding(optimizer)
    gather_with_padding(optimizer)  # the same as once
    assert misplaced(optimizer) == 0


def test_the_repair_takes_no_second_copy(optimizer):
    """What is gathered is allocated once, padding included."""
    gather_with_padding(optimizer)
    sizes = [(b.numel_unpadded, b.numel) for b in optimizer.buffers]
    with LargeAllocations(min(numel for _, numel in sizes)) as made:
        optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    assert made.count == 3 * len(sizes)
    assert [(b.numel_unpadded, b.numel) for b in optimizer.buffers] == sizes


class LargeAllocations(TorchDispatchMode):
    """Count operations that make a tensor of at least so many elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, function, _types, arguments=(), more=None):
        made = function(*arguments, **(more or {}))
        if function in (torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default):
            self.count += made.numel() >= self.elements
        return made
