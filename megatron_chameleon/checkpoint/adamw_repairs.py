"""torch's AdamW in megatron's optimizers: what loading a checkpoint gets wrong.

With Apex or Transformer Engine the step count lies in the parameter groups; torch's AdamW keeps one
per parameter. megatron-core 0.16 mixes the two when it loads: it asks a fresh optimizer for a step
count it does not have yet, looks for a step in every parameter's saved state, writes in place to
leaf views, and lets all parameters share one step tensor, which then counts once per parameter.
Unsharded optimizers load the step only where the optimizer that saved it kept it.
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


def convert_loaded_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Bring loaded state to the form of this process's Adam, whichever Adam saved it.

    torch's AdamW keeps the step per parameter, which megatron saves as ``common_step``; the
    FusedAdam of Transformer Engine and Apex keeps it in the parameter groups. A saved group has
    only the settings of the optimizer that saved it.

    Args:
        optimizer: a chained optimizer that ``state`` is about to be loaded into.
        state: as megatron's ``sharded_state_dict`` nests it; changed in place.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, part in enumerate(parts):
        saved = state if len(parts) == 1 else state[number]
        saved = saved.get("optimizer", saved)  # nested, but for fp32
        for group in saved["param_groups"]:
            for name, value in part.optimizer.defaults.items():
                group.setdefault(name, value)
        if not isinstance(part, DistributedOptimizer):
            _place_step(saved, per_parameter=isinstance(part.optimizer, torch.optim.AdamW))


def _place_step(saved: dict[str, Any], *, per_parameter: bool) -> None:
    steps = [group["step"] for group in saved["param_groups"] if "step" in group]
    if per_parameter and steps:
        saved["state"]["common_step"] = torch.tensor(float(max(steps)))
        for group in saved["param_groups"]:
            group.pop("step", None)
    elif not per_parameter and "common_step" in saved["state"]:
        step = int(saved["state"].pop("common_step"))
        for group in saved["param_groups"]:
            group["step"] = step


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
