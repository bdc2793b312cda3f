"""The state of the random number generators of every rank, in a checkpoint.

Nothing that is trained here draws from them while it trains (no dropout; data is a function of seed
and index). A method that does goes on as it was, in the same layout; in another one, ranks that had
no counterpart go on from the seed.

The states are tensors under the name of the rank's place, so that nothing has to be unpickled.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

States = dict[str, torch.Tensor]
Sharded = dict[str, ShardedTensor]


def random_states() -> States:
    """This rank's generators: name -> state, uint8 on the CPU; megatron's own begin with "mp."."""
    tracked = get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        **{f"mp.{name}": state for name, state in tracked.items()},
    }


def set_random_states(states: States) -> None:
    """Set those of this rank's generators that ``states`` has."""
    tracker = get_cuda_rng_tracker()
    tracked = {n.removeprefix("mp."): s for n, s in states.items() if n.startswith("mp.")}
    tracker.set_states({**tracker.get_states(), **tracked})
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "cpu" in states:  # after "cuda", for which the CPU stands in where there is none
        torch.set_rng_state(states["cpu"])


def sharded_random_states() -> Sharded:
    """What a checkpoint holds of this rank's generators."""
    place = _place()
    return {
        name: ShardedTensor.from_rank_offsets(f"random_state.{place}.{name}", state)
        for name, state in random_states().items()
    }


def loadable_random_states(index: Metadata) -> Sharded:
    """What a checkpoint with this index holds of this rank's generators, as what is to be read."""
    return {
        name: tensor
        for name, tensor in sharded_random_states().items()
        if _size_in(index, tensor.key) == tensor.global_shape
    }


def _size_in(index: Metadata, key: str) -> tuple[int, ...] | None:
    """The shape of a tensor in a checkpoint; None if it has none of this name."""
    found = index.state_dict_metadata.get(key)
    return tuple(found.size) if isinstance(found, TensorStorageMetadata) else None


def _place() -> str:
    """This rank's place in its layout."""
    return ".".join(
        (
            f"pipeline{parallel_state.get_pipeline_model_parallel_rank()}",
            f"tensor{parallel_state.get_tensor_model_parallel_rank()}",
            f"data{parallel_state.get_data_parallel_rank()}",
        )
    )
