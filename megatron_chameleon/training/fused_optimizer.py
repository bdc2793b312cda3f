"""torch's fused kernels in megatron's optimizer, where Transformer Engine and Apex are absent.

With neither, megatron-core updates parameters, clips gradients and takes their norm one tensor
after the other, and fetches every tensor's norm from the device by itself: hundreds of waits a
step. Here the update is one fused kernel, clipping a few, and the norm is fetched once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Let ``optimizer``, and megatron's gradient clipping, use torch's fused kernels.

    What Transformer Engine or Apex brings is left alone.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            _fuse(part.optimizer)
            # A checkpoint brings the settings of its parameter groups along.
            part.optimizer.register_load_state_dict_post_hook(_fuse)
    # megatron chooses these functions when it is imported, and takes no others by argument.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


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
