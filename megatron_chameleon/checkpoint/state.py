"""What a checkpoint holds, as sharded state: each rank names its part of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_chameleon.checkpoint.bucket_repair import gather_with_padding
from megatron_chameleon.checkpoint.random_state import sharded_random_states
from megatron_chameleon.model.gpt import unwrap

# The only optimizer format that another tensor or pipeline parallel degree can read.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

RANDOM = "random"

State = dict[str, Any]


def model_state(model: Sequence[torch.nn.Module]) -> State:
    """Weights of this rank's chunks, which may be wrapped for data parallelism or bfloat16."""
    return {
        f"model{number}": unwrap(chunk).sharded_state_dict() for number, chunk in enumerate(model)
    }


def finish_param_gather(model: Sequence[torch.nn.Module]) -> None:
    """Bring parameters up to date that would only be gathered in the next forward pass.

    Every rank calls this before parameters are read in any other way than by a forward pass.
    """
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def training_state(
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> State:
    """Weights, optimizer, schedule and random state: all that a run needs to go on.

    With ``is_loading``, what of it every checkpoint has: the random state depends on the layout.
    """
    finish_param_gather(model)
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

    Scalars go into the checkpoint's common state, which is pickled and compared across ranks. A
    tensor of ``cuda:0`` would be unpickled onto that device by every rank.
    """
    return value.cpu() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
