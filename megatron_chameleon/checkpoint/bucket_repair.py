"""megatron's distributed optimizer with several gradient buckets: what its saving gets wrong.

For a checkpoint, megatron-core 0.16 gathers the state of a whole gradient buffer without the
padding between its buckets, but then cuts parameters out of it at offsets that count the padding.
What lies behind the first bucket is shifted, and saved wrong without a word. There are several
buckets as soon as gradients are reduced while the backward pass goes on, and in the first pipeline
stage, where the tied embedding has a bucket of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")
_GATHER = "get_parameter_state_dp_zero"


def gather_with_padding(optimizer: MegatronOptimizer) -> None:
    """Make every distributed optimizer inside ``optimizer`` gather its state with the padding."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and _GATHER not in vars(part):
            _replace_gather(part)


def _replace_gather(optimizer: DistributedOptimizer) -> None:
    """Replace the method on this optimizer only."""
    gather = getattr(optimizer, _GATHER)

    def gather_padded(**settings: Any) -> dict[Any, Any] | None:
        state: dict[Any, Any] | None = gather(**settings)
        if state is not None:
            for number, buffer in enumerate(optimizer.buffers):
                for tensors in state[number].values():
                    tensors.update({key: _padded(tensors[key], buffer) for key in _STATE_KEYS})
        return state

    setattr(optimizer, _GATHER, gather_padded)


def _padded(values: torch.Tensor, buffer: Any) -> torch.Tensor:
    """``values`` of all buckets one after the other, each moved to its offset in ``buffer``."""
    whole = values.new_zeros(buffer.numel)
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    for bucket, part in zip(buffer.buckets, values.split(sizes), strict=True):
        whole[bucket.offset : bucket.offset + len(part)] = part
    return whole
