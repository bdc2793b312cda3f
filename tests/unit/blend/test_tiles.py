from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from megatron_chameleon.blend.tiles import LINE_BYTES, TILE, finish_writing, write_tile
from megatron_chameleon.blend.vectors import LANES


@njit
def write(domains, numbers, start, length, dataset_index, dataset_sample_index):
    write_tile(domains, numbers, start, length, dataset_index, dataset_sample_index)
    finish_writing()


# Whole cache lines, which are written past the cache, and any other place.
@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_each_lane_is_written_to_its_stretch(dtype, offset):
    rng = np.random.default_rng(0)
    length, start = 3 * TILE, TILE
    domains = rng.integers(0, 2**15, (TILE, LANES)).astype(np.int16)
    numbers = rng.integers(-(2**31), 2**31, (TILE, LANES)).astype(dtype)
    memory = np.full(LANES * length + 16, -1, np.int64)
    to_line = -memory.ctypes.data % LINE_BYTES // 8
    found = memory[to_line + offset :][: LANES * length]
    index = np.full(LANES * length, -1, np.int16)
    write(domains.ravel(), numbers.ravel(), start, length, index, found)
    for out, rows in ((index, domains), (found, numbers)):
        expected = np.full((LANES, length), -1, out.dtype)
        expected[:, start : start + TILE] = rows.T
        np.testing.assert_array_equal(out.reshape(LANES, length), expected)
    untouched = np.delete(memory, np.arange(to_line + offset, to_line + offset + LANES * length))
    assert (untouched == -1).all()
