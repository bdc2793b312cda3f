"""Fixes for saving and loading optimizer state in megatron-core 0.16 to 0.19.

Loading. Apex and Transformer Engine keep the step count in the parameter groups; torch's AdamW
keeps it in the state of each parameter. megatron confuses the two conventions:

- It reads the step count of a new optimizer, which has no step count yet.
- It expects a step count in the saved state of every parameter.
- All parameters get the same step tensor, which is then incremented once per parameter.
- An unsharded optimizer restores the step count only if the saving optimizer kept the step count in
  the same place.

Saving. The distributed optimizer gathers the state of a gradient buffer without the padding between
its buckets, but slices parameters at offsets that include the padding. So the state after the first
bucket is shifted and saved wrong, without an error. A buffer has several buckets with
``overlap_grad_reduce``, and in the first pipeline stage, where the tied embedding has its own
bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GATHER = "get_parameter_state_dp_zero"


def prepare_for_loading(optimizer: MegatronOptimizer) -> None:
    """Create the state to load into, for every distributed torch AdamW inside ``optimizer``."""
    for part in _distributed_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            create_zero_state(part)
            load_into_own_steps(part)


def convert_loaded_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Convert loaded state for this process's Adam, regardless of the Adam that saved it.

    torch's AdamW keeps the step per parameter, which megatron saves as ``common_step``; the
    FusedAdam of Transformer Engine and Apex keeps it in the parameter groups. A saved parameter
    group has only the settings of the optimizer that saved it.

    Args:
        optimizer: the optimizer that ``state`` will be loaded into.
        state: as nested by megatron's ``sharded_state_dict``; changed in place.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, part in enumerate(parts):
        saved = state if len(parts) == 1 else state[number]
        saved = saved.get("optimizer", saved)  # the state is nested, except in fp32
        for group in saved["param_groups"]:
            for name, value in part.optimizer.defaults.items():
                group.setdefault(name, value)
        if isinstance(part, DistributedOptimizer):
            continue
        steps = [group.pop("step") for group in saved["param_groups"] if "step" in group]
        steps += [saved["state"].pop("common_step")] if "common_step" in saved["state"] else []
        if isinstance(part.optimizer, torch.optim.AdamW) and steps:
            saved["state"]["common_step"] = torch.tensor(float(max(steps)))
        else:
            for group in saved["param_groups"] if steps else []:
                group["step"] = int(max(steps))


def create_zero_state(optimizer: DistributedOptimizer) -> None:
    """Create the optimizer state of step 0 for every parameter of this rank's shard."""
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.optimizer.state[parameter]:
                optimizer.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{key: torch.zeros_like(parameter) for key in _MOMENTS},
                }


def gather_with_padding(optimizer: MegatronOptimizer) -> None:
    """Make every distributed optimizer inside ``optimizer`` gather its state with padding."""
    for part in _distributed_parts(optimizer):
        if _GATHER not in vars(part):
            gather = functools.partial(_gather_padded, part, getattr(part, _GATHER))
            setattr(part, _GATHER, gather)


def _distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def load_into_own_steps(optimizer: DistributedOptimizer) -> None:
    """Replace the method that writes loaded tensors, on this optimizer only."""

    def set_state(model_parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main_parameter]
        state["step"] = state["step"].clone()  # every parameter gets its own copy
        main_parameter.copy_(tensors["param"])
        for key in _MOMENTS:
            state[key].copy_(tensors[key])

    optimizer._set_main_param_and_optimizer_states = set_state


def _gather_padded(
    optimizer: DistributedOptimizer, gather: Callable[..., Any], **settings: Any
) -> Any:
    """Gather buckets with their padding, so that buckets keep their offsets.

    Shifting the gathered state afterwards would need a second copy of up to 12 bytes per parameter
    on the host of every rank.
    """
    padded = {buffer: buffer.numel for buffer in optimizer.buffers}
    padded |= {b: b.grad_data.numel() for buffer in optimizer.buffers for b in buffer.buckets}
    unpadded = {part: part.numel_unpadded for part in padded}
    try:
        for part, size in padded.items():
            part.numel_unpadded = size
        return gather(**settings)
    finally:
        for part, size in unpadded.items():
            part.numel_unpadded = size
