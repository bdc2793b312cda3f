"""Arrays at chosen addresses, to test kernels whose code depends on the alignment of arguments."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
Scalar = TypeVar("Scalar", bound=np.generic)


def at_offset(array: NDArray[Scalar], offset: int) -> NDArray[Scalar]:
    """Return a copy of ``array`` that begins ``offset`` bytes after the start of a cache line.

    Args:
        array: C-contiguous, any shape and dtype.
        offset: offset in bytes, below 64; a multiple of the item size, so that elements stay
            aligned.
    """
    memory = np.empty(array.nbytes + 2 * LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES + offset
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert copy.flags.aligned
    return copy
