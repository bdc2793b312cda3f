"""Writing what the lanes of a kernel gave, sample by sample, to a stretch of memory for each lane.

Squares of a tile are transposed in registers. The larger of the two outputs is written past the
cache where it can be, since else each line would be read from memory before it is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.base import BaseContext
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatron_chameleon.blend.vectors import LANES, Emitted, pointer_to

TILE = 64
"""Samples that each lane takes before they are written out."""
# Rows and lanes of a square: of so many int64 a cache line is made.
SIDE = 8
LINE_BYTES = 64

INT32, INT64 = ir.IntType(32), ir.IntType(64)


@njit(inline="always")
def write_tile(
    domains: NDArray[np.int16],
    numbers: NDArray[np.int32] | NDArray[np.int64],
    start: int,
    length: int,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> None:
    """Write a tile to the stretches of all lanes.

    Args:
        domains: [TILE * LANES] int16, those of all lanes at one sample after another.
        numbers: [TILE * LANES] int32 or int64, the same.
        start: where in each stretch.
        length: samples in a stretch, a multiple of the tile.
        dataset_index: [LANES * length] int16, written.
        dataset_sample_index: [LANES * length] int64, written.
    """
    whole_lines = dataset_sample_index.ctypes.data % LINE_BYTES == 0
    for lane in range(0, LANES, SIDE):
        for step in range(0, TILE, SIDE):
            place, sample = step * LANES + lane, start + step + lane * length
            _write_square(domains, place, dataset_index, sample, length)
            if whole_lines:
                _write_lines(numbers, place, dataset_sample_index, sample, length)
            else:
                _write_square(numbers, place, dataset_sample_index, sample, length)


@intrinsic
def finish_writing(_: Any) -> Emitted:
    """``finish_writing()``: what was written past the cache is seen by other threads, too."""

    def emit(context: BaseContext, builder: ir.IRBuilder, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _square_writer(past_the_cache: bool) -> Any:
    """``write(rows, place, out, sample, length)``: transpose ``SIDE`` rows of ``SIDE`` lanes.

    Row r begins at rows[place + r * LANES]; lane l is written from out[sample + l * length] on.
    What is written past the cache is whole cache lines.
    """

    @intrinsic
    def write(_: Any, rows: Any, place: Any, out: Any, sample: Any, length: Any) -> Emitted:
        def emit(context: BaseContext, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
            data, first, written, start, apart = arguments
            row_type, lane_type = (
                ir.VectorType(context.get_value_type(array.dtype), SIDE) for array in (rows, out)
            )
            vectors = []
            for row in range(SIDE):
                at = builder.add(first, ir.Constant(INT64, row * LANES))
                pointer = pointer_to(context, builder, rows, (data, at), row_type)
                vectors.append(builder.load(pointer, align=rows.dtype.bitwidth // 8))
            for lane, vector in enumerate(_transposed(builder, vectors)):
                at = builder.add(start, builder.mul(apart, ir.Constant(INT64, lane)))
                pointer = pointer_to(context, builder, out, (written, at), lane_type)
                widened = vector if row_type == lane_type else builder.sext(vector, lane_type)
                if past_the_cache:
                    once = builder.module.add_metadata([ir.Constant(INT32, 1)])
                    store = builder.store(widened, pointer, align=LINE_BYTES)
                    store.set_metadata("nontemporal", once)
                else:
                    builder.store(widened, pointer, align=out.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(rows, types.int64, out, types.int64, types.int64), emit

    return write


_write_lines, _write_square = _square_writer(True), _square_writer(False)


def _transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of a square: halves are swapped across its diagonal, then quarters, and so on."""
    half = SIDE // 2
    while half:
        # Of two rows that are half a block apart, their first halves, and their second ones. The
        # places in the other row are from SIDE on.
        firsts = [SIDE + (i ^ half) if i & half else i for i in range(SIDE)]
        seconds = [SIDE + i if i & half else i | half for i in range(SIDE)]
        masks = [ir.Constant(ir.VectorType(INT32, SIDE), places) for places in (firsts, seconds)]
        rows = [
            builder.shuffle_vector(rows[i & ~half], rows[i | half], masks[bool(i & half)])
            for i in range(SIDE)
        ]
        half //= 2
    return rows
