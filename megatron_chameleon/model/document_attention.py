"""Causal attention within documents, without a mask of every pair of tokens.

torch's flex attention (Dong et al. 2024, "Flex Attention: A Programming Model for Generating
Optimized Attention Kernels") computes scores in blocks. It skips blocks without visible pairs, and
masks pairs only in blocks that are partly visible. The lists of blocks are computed once per
micro-batch. They are packed into one tensor, since megatron's recomputation keeps only tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.triton_probe import triton_problem

BLOCK_SIZE = 128
"""Queries, and keys, of a block."""
LEAST_HEAD_DIM = 16
"""Smallest head dimension of the kernels."""


def check_document_attention() -> None:
    """Check that flex attention can be compiled, if there is a CUDA device.

    Raises:
        UserError: if it cannot.
    """
    problem = triton_problem() if torch.cuda.is_available() else None
    if problem is not None:
        raise UserError(f"--document-attention flex: {problem}; or leave it out")


def document_blocks(starts: torch.Tensor) -> torch.Tensor:
    """Pack the blocks of causal attention within documents, for :func:`document_attention`.

    Args:
        starts: [b, s] integers, the position at which each token's document starts. A query sees
            the keys from its start to itself.

    Returns:
        int32 [n]: ``starts``; then, for partly and for fully visible blocks, the number of visible
        blocks of keys of each block of queries and their list, and the same of each block of keys.
    """
    rows = starts[:, ::BLOCK_SIZE]  # the smallest start of each block of queries
    count = rows.size(1)
    ends = torch.arange(1, count + 1, device=starts.device) * BLOCK_SIZE
    largest = starts[:, ends.clamp(max=starts.size(1)) - 1]
    block = torch.arange(count, device=starts.device)
    earlier, same = block < block[:, None], block == block[:, None]  # [queries, keys]
    first_full = (largest + BLOCK_SIZE - 1) // BLOCK_SIZE
    # [b, queries, keys]; like torch, count an incomplete block of queries as partly visible.
    full = earlier & (block >= first_full[:, :, None]) & (ends <= starts.size(1))[:, None]
    visible = earlier & (block >= (rows // BLOCK_SIZE)[:, :, None]) | same
    parts = [starts]
    for blocks in (visible & ~full, full):
        for lists in (blocks, blocks.mT):
            visible_first = (~lists).to(torch.uint8).argsort(dim=-1, stable=True)
            parts += [lists.sum(-1), visible_first]
    return torch.cat([part.flatten().to(torch.int32) for part in parts])


def block_mask(packed: torch.Tensor, batch: int, length: int) -> BlockMask:
    """Return flex attention's mask of ``packed``, the blocks of ``batch`` samples.

    Args:
        packed: from :func:`document_blocks`.
        batch: number of samples (b).
        length: tokens per sample (s).
    """
    count = -(-length // BLOCK_SIZE)
    numbers, lists = batch * count, batch * count * count
    parts = packed.split([batch * length, *[numbers, lists] * 4])
    if torch.compiler.is_compiling():
        # The compiler's kernels may confuse views of one tensor.
        parts = tuple(part.clone() for part in parts)
    starts, *parts = parts
    starts = starts.view(batch, length)
    blocks = [part.view(batch, 1, count, *[count] * (i % 2)) for i, part in enumerate(parts)]

    def is_visible(
        sample: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (key >= starts[sample, query])

    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=blocks[0],
        kv_indices=blocks[1],
        q_num_blocks=blocks[2],
        q_indices=blocks[3],
        full_kv_num_blocks=blocks[4],
        full_kv_indices=blocks[5],
        full_q_num_blocks=blocks[6],
        full_q_indices=blocks[7],
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=is_visible,
    )


# Without fullgraph, torch would run flex attention eagerly, with a matrix of all scores, once there
# are more shapes than it compiles a function for.
compiled_flex_attention: Callable[..., Any] = torch.compile(
    flex_attention, dynamic=False, fullgraph=True
)


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute causal attention within documents, in one kernel that is compiled at the first call.

    A CPU has no backward pass.

    Args:
        query: [b, n, s, d].
        key: [b, groups, s, d].
        value: [b, groups, s, d].
        packed: from :func:`document_blocks`.
        scale: factor of the scores.

    Returns:
        [b, n, s, d].
    """
    padding = max(0, LEAST_HEAD_DIM - query.size(-1))
    q, k, v = (pad(t, (0, padding)) if padding else t for t in (query, key, value))
    mask = block_mask(packed, q.size(0), q.size(2))
    is_grouped = q.size(1) != k.size(1)
    context: torch.Tensor = compiled_flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped
    )
    return context[..., : query.size(-1)]
