"""The end of a backward pass: gradients reduced over the ranks, and divided by the tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from megatron.core.process_groups_config import ProcessGroupCollection


def finalize_gradients(
    model: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None,
    *,
    pg_collection: ProcessGroupCollection,
    force_all_reduce: bool = False,
) -> None:
    """As megatron's ``finalize_model_grads``, to the bit, but nothing waits for the device.

    megatron's asks on the host, once for each chunk, whether there are any tokens to divide by.

    Args:
        model: this rank's chunks.
        num_tokens: int32 scalar on the device, tokens of this rank's micro-batches that have a
            loss, counted on the last pipeline stage; None where losses are means already. It is
            overwritten.
        pg_collection: groups of ranks, as schedules give them.
        force_all_reduce: whether gradients that are sharded otherwise are whole on every rank.
    """
    finalize_model_grads(model, None, pg_collection, force_all_reduce)
    if num_tokens is None:
        return
    pipeline = pg_collection.pp
    dist.broadcast(num_tokens, src=get_pp_last_rank(pipeline), group=pipeline)
    dist.all_reduce(num_tokens, group=pg_collection.dp_cp)
    scale = 1.0 / num_tokens.clamp(min=1)  # without tokens the gradient is zero as it is
    for chunk in model:
        chunk.scale_gradients(scale)
