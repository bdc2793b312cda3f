"""What a checkpoint holds, as sharded state: each rank names its part of every tensor."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_chameleon.model.gpt import unwrap

# The only optimizer format that another tensor or pipeline parallel degree can read.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

State = dict[str, Any]


def model_state(model: torch.nn.Module) -> State:
    """Weights. ``model`` may be wrapped for data parallelism or mixed precision."""
    return {"model": unwrap(model).sharded_state_dict()}


def training_state(
    model: torch.nn.Module,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> State:
    """Weights, optimizer and schedule: all that a run needs to go on."""
    state = model_state(model)
    state["optimizer"] = optimizer.sharded_state_dict(
        state["model"], is_loading=is_loading, metadata=OPTIMIZER_FORMAT
    )
    state["scheduler"] = scheduler.state_dict()
    return state
