"""Sharded state of a training run: each rank contributes its shards of every tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_chameleon.checkpoint.optimizer_fixes import gather_with_padding
from megatron_chameleon.model.gpt import unwrap

# This is the only optimizer format that can be loaded with another tensor- or pipeline-parallel
# size.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

RANDOM = "random"

State = dict[str, Any]


def model_state(model: Sequence[torch.nn.Module], names: Collection[str] = ()) -> State:
    """Return the sharded weights of this rank's model chunks, with or without wrappers.

    Args:
        model: the chunks.
        names: names of the tensors of a checkpoint that is read. Megatron-LM has options to store
            each layer, and each half of SwiGLU's matrix, as a separate tensor.
    """
    layout = {
        "non_homogeneous_layers": any(name.startswith("decoder.layers.0.") for name in names),
        "singleton_local_shards": any(name.endswith("linear_fc1.weight_w") for name in names),
    }
    return {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=layout)
        for number, chunk in enumerate(model)
    }


def training_state(
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> State:
    """Return the sharded weights, optimizer, scheduler and random states. Collective.

    With ``is_loading``, random states are left out, because the parallel layout that wrote a
    checkpoint determines which random states it holds.
    """
    for chunk in model:
        # Complete the all-gather of parameters that overlap_param_gather defers to the next forward
        # pass.
        if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)
    gather_with_padding(optimizer)
    state = model_state(model)
    sharded = optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=OPTIMIZER_FORMAT
    )
    state["optimizer"] = dict_list_map_outplace(scalar_to_host, sharded)
    state["scheduler"] = scheduler.state_dict()
    if not is_loading:
        state[RANDOM] = sharded_random_states()
    return state


def scalar_to_host(value: Any) -> Any:
    """Copy a 0-dim tensor, such as AdamW's step count, to the host; return anything else unchanged.

    Scalars go into the checkpoint's common state, which is pickled and compared across ranks. Every
    rank would unpickle a tensor of ``cuda:0`` onto that device.
    """
    return value.cpu() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


# Random states. Training does not depend on them: the generators of dropout are seeded before each
# step, and the data order is a function of seed and index. The hook of a method may depend on them.
# Random states are saved as tensors, named by the rank's coordinates, so that nothing has to be
# unpickled. In another layout, ranks without a saved state keep their seeded state.


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators by name, uint8 tensors on the CPU.

    The names of megatron's generators start with "mp.".
    """
    tracked = get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        **{f"mp.{name}": state for name, state in tracked.items()},
    }


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set the generators named in ``states``; other generators are unchanged."""
    tracker = get_cuda_rng_tracker()
    tracked = {n.removeprefix("mp."): s for n, s in states.items() if n.startswith("mp.")}
    tracker.set_states({**tracker.get_states(), **tracked})
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "cpu" in states:  # must come after "cuda", which sets the CPU generator if there is no GPU
        torch.set_rng_state(states["cpu"])


def sharded_random_states() -> dict[str, ShardedTensor]:
    """Return this rank's random states as sharded tensors to save."""
    coordinates = (
        f"pipeline{parallel_state.get_pipeline_model_parallel_rank()}"
        f".tensor{parallel_state.get_tensor_model_parallel_rank()}"
        f".data{parallel_state.get_data_parallel_rank()}"
    )
    return {
        name: ShardedTensor.from_rank_offsets(f"random_state.{coordinates}.{name}", state)
        for name, state in random_states().items()
    }


def loadable_random_states(index: Metadata) -> dict[str, ShardedTensor]:
    """Return this rank's random states that the checkpoint with this ``index`` holds."""

    def is_held(tensor: ShardedTensor) -> bool:
        entry = index.state_dict_metadata.get(tensor.key)
        return isinstance(entry, TensorStorageMetadata) and entry.size == tensor.global_shape

    return {name: tensor for name, tensor in sharded_random_states().items() if is_held(tensor)}
