"""megatron's distributed optimizer with torch's AdamW: what its checkpoint loading gets wrong.

With Apex or Transformer Engine the step count lies in the parameter groups; torch's AdamW keeps one
per parameter. megatron-core 0.16 mixes the two when it loads: it asks a fresh optimizer for a step
count it does not have yet, looks for a step in every parameter's saved state, writes in place to
leaf views, and lets all parameters share one step tensor, which then counts once per parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_STATE_KEYS = ("exp_avg", "exp_avg_sq")


def prepare_for_loading(optimizer: MegatronOptimizer) -> None:
    """Give every distributed optimizer inside ``optimizer`` a state that can be loaded into."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW):
            create_zero_state(part)
            write_loaded_state_safely(part)


def create_zero_state(optimizer: DistributedOptimizer) -> None:
    """The state of step 0 for every parameter of this rank's shard."""
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.optimizer.state[parameter]:
                optimizer.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{key: torch.zeros_like(parameter) for key in _STATE_KEYS},
                }


def write_loaded_state_safely(optimizer: DistributedOptimizer) -> None:
    """Replace the method that writes loaded tensors, on this optimizer only."""

    @torch.no_grad()  # the fp32 shards are views of leaves
    def set_state(model_parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main_parameter]
        state["step"] = state["step"].clone()  # its own count from here on
        main_parameter.copy_(tensors["param"])
        for key in _STATE_KEYS:
            state[key].copy_(tensors[key])

    optimizer._set_main_param_and_optimizer_states = set_state
