"""torch's fused kernels in megatron's optimizer, where Transformer Engine and Apex are absent.

With neither, megatron-core updates parameters, clips gradients and takes their norm one tensor
after the other, and fetches every tensor's norm from the device by itself: hundreds of waits a
step. Here the update is one fused kernel, clipping a few, and the norm is fetched once. With or
without them it copies bf16 weights back one tensor after the other; here that is one kernel too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Let ``optimizer``, and megatron's gradient clipping, use torch's fused kernels.

    What Transformer Engine or Apex brings is left alone.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, (DistributedOptimizer, Float16OptimizerWithFloat16Params)):
            part._copy_main_params_to_model_params = functools.partial(write_back, part)
        if isinstance(part.optimizer, torch.optim.AdamW):
            _fuse(part.optimizer)
            # A checkpoint brings the settings of its parameter groups along.
            part.optimizer.register_load_state_dict_post_hook(_fuse)
    # megatron chooses these functions when it is imported, and takes no others by argument.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def write_back(optimizer: DistributedOptimizer | Float16OptimizerWithFloat16Params) -> None:
    """Copy the fp32 main weights, or this rank's shard of them, to the model's bf16 weights.

    As megatron's ``_copy_main_params_to_model_params``, with one kernel. The main weights of an
    fp32 model are the model's own.
    """
    if isinstance(optimizer, DistributedOptimizer):
        targets, sources = _shards(optimizer)
    else:
        targets, sources = optimizer._get_model_and_main_params_data_float16()
    if targets:
        torch._foreach_copy_(targets, sources)


def _shards(optimizer: DistributedOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shard of each bf16 weight, flat, in the buffer that is gathered; and its fp32."""
    if optimizer.is_stub_optimizer:  # a rank without parameters
        return [], []
    parameters = [p for group in optimizer.model_float16_groups for p in group]
    targets = []
    for parameter in parameters:
        buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
        place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
        targets.append(weights[place.start : place.end])
    return targets, [main for group in optimizer.shard_fp32_from_float16_groups for main in group]


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if "step" in state:  # the fused kernel reads it on the parameter's device
            state["step"] = state["step"].to(parameter.device, torch.float32)


def l2_norm(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    _per_tensor: bool,
    *_more: Any,
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1] in float32, left on their device; as amp_C's function."""
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    factor: float,
) -> None:
    """Write ``factor`` times the first list's tensors to the second's; as amp_C's function."""
    sources, targets = tensor_lists
    if any(s.data_ptr() != t.data_ptr() for s, t in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
