"""Triton kernels of the masked mean. They read each valid hidden state once, and skip padding.

``pooling.py`` has the reference in plain torch. The positions of a sequence are split into chunks.
A program of the first kernel sums one chunk of one sequence; a program of the second adds up the
chunks. The order of summation is fixed, so results are deterministic, unlike results of atomic
additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_chameleon.embedding.pooling import FinalNorm

CHUNK = 128
"""Number of positions that one program sums."""
# Maximum elements in a program's registers. Only a fused norm needs whole rows.
TILE_ELEMENTS = 4096
WIDEST_TILE = 512
WARPS = 4
ADDING_TILE = 256


@triton.jit
def chunk_sums_kernel(  # type: ignore[no-untyped-def]
    hidden,
    lengths,
    sums,
    width,
    position_stride,
    batch_stride,
    epsilon,
    NORMALIZE: tl.constexpr,
    CENTER: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sums[chunk, row, :] = sum of the row's valid states in a chunk, optionally normalized.

    LayerNorm subtracts the mean of each state (CENTER), and RMSNorm does not.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)  # int64, since row * stride may exceed 2**31
    inside = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    first = chunk * CHUNK
    stop = tl.minimum(first + CHUNK, tl.load(lengths + row).to(tl.int32))
    while first < stop:
        positions = first + tl.arange(0, ROWS)
        read = (positions < stop)[:, None] & inside[None, :]
        places = positions.to(tl.int64)[:, None] * position_stride + columns[None, :]
        states = tl.load(hidden + row * batch_stride + places, mask=read, other=0.0)
        states = states.to(tl.float32)
        if NORMALIZE:
            if CENTER:
                mean = tl.sum(states, 1) / width
                states = tl.where(read, states - mean[:, None], 0.0)
            mean_square = tl.sum(states * states, 1) / width
            states = states / tl.sqrt(mean_square + epsilon)[:, None]
        total += tl.sum(states, 0)
        first += ROWS
    rows = tl.num_programs(2).to(tl.int64)
    tl.store(sums + (chunk * rows + row) * width + columns, total, mask=inside)


@triton.jit
def add_chunks_kernel(  # type: ignore[no-untyped-def]
    sums,
    lengths,
    weight,
    bias,
    means,
    width,
    NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """means[row, :] = sum of the row's chunks / length; scaled and shifted if normalized."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1).to(tl.int64)
    inside = columns < width
    length = tl.load(lengths + row)
    chunks = (length.to(tl.int32) + CHUNK - 1) // CHUNK
    total = tl.zeros([COLUMNS], tl.float32)
    chunk = 0
    while chunk < chunks:
        total += tl.load(sums + (chunk * rows + row) * width + columns, mask=inside, other=0.0)
        chunk += 1
    mean = total / tl.maximum(length, 1).to(tl.float32)
    if NORMALIZE:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        mean = tl.where(length > 0, mean * scale + shift, 0.0)
    tl.store(means + row * width + columns, mean, mask=inside)


def launch_masked_mean(
    hidden_states: torch.Tensor, lengths: torch.Tensor, norm: FinalNorm | None
) -> torch.Tensor:
    """Return the masked mean [b, h], float32, of ``hidden_states``; see ``pooling.masked_mean``.

    Args:
        hidden_states: [s, b, h] with stride 1 in h.
        lengths: [b] int64, number of valid positions, at most s.
        norm: applied to the hidden states first.
    """
    size, rows, width = hidden_states.shape
    assert hidden_states.stride(2) == 1
    chunks = max(1, triton.cdiv(size, CHUNK))
    sums = hidden_states.new_empty((chunks, rows, width), dtype=torch.float32)
    means = hidden_states.new_empty((rows, width), dtype=torch.float32)
    if means.numel() == 0:
        return means
    weight = bias = sums  # not read without a norm
    if norm is not None:
        weight = norm.weight.contiguous()
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.contiguous()
    tile_rows, columns = tile(width, norm is not None)
    chunk_sums_kernel[(triton.cdiv(width, columns), chunks, rows)](
        hidden_states,
        lengths,
        sums,
        width,
        hidden_states.stride(0),
        hidden_states.stride(1),
        norm.epsilon if norm else 0.0,
        NORMALIZE=norm is not None,
        CENTER=norm is not None and norm.bias is not None,
        CHUNK=CHUNK,
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=WARPS,
    )
    add_chunks_kernel[(triton.cdiv(width, ADDING_TILE), rows)](
        sums,
        lengths,
        weight,
        bias,
        means,
        width,
        NORMALIZE=norm is not None,
        CHUNK=CHUNK,
        COLUMNS=ADDING_TILE,
        num_warps=WARPS,
    )
    return means


def tile(width: int, normalize: bool) -> tuple[int, int]:
    """Return how many positions and columns a program holds in registers, as powers of two."""
    columns = triton.next_power_of_2(width)
    if not normalize:
        columns = min(columns, WIDEST_TILE)
    return max(1, min(CHUNK, TILE_ELEMENTS // columns)), columns
