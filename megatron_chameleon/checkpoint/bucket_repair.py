"""megatron's distributed optimizer with several gradient buckets: what its saving gets wrong.

For a checkpoint, megatron-core 0.16 gathers the state of a whole gradient buffer without the
padding between its buckets, but then cuts parameters out of it at offsets that count the padding.
What lies behind the first bucket is shifted, and saved wrong without a word. There are several
buckets as soon as gradients are reduced while the backward pass goes on, and in the first pipeline
stage, where the tied embedding has a bucket of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

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
        with _padding_counted(optimizer.buffers):
            state: dict[Any, Any] | None = gather(**settings)
        return state

    setattr(optimizer, _GATHER, gather_padded)


@contextlib.contextmanager
def _padding_counted(buffers: Sequence[Any]) -> Iterator[None]:
    """Let sizes without padding include it, so that buckets are gathered to their own offsets.

    The state is up to 12 bytes a parameter on the host of every rank: moving it afterwards would
    take a second copy.
    """
    padded = {buffer: buffer.numel for buffer in buffers}
    padded |= {b: b.grad_data.numel() for buffer in buffers for b in buffer.buckets}
    unpadded = {part: part.numel_unpadded for part in padded}
    try:
        for part, size in padded.items():
            part.numel_unpadded = size
        yield
    finally:
        for part, size in unpadded.items():
            part.numel_unpadded = size
