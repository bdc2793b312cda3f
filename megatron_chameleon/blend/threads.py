"""Compiled kernels on several threads: plain ones, since the kernels let go of Python's lock.

numba's own threads are not used: their layers do not go with the OpenMP of torch, with forked
workers of a data loader, or with two callers at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


def usable_threads(num_threads: int | None = None) -> int:
    """``num_threads``, or by default one for every core this process may run on.

    Raises:
        ValueError: for fewer than one.
    """
    if num_threads is None:
        return len(os.sched_getaffinity(0))
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; at least one is needed")
    return num_threads


def for_each(
    kernel: Callable[[Part], Result], parts: Sequence[Part], num_threads: int
) -> list[Result]:
    """``[kernel(part) for part in parts]``, on up to ``num_threads`` threads.

    A thread takes the next part when it is done with one, so that uneven parts share the work.
    """
    if num_threads == 1 or len(parts) < 2:
        return [kernel(part) for part in parts]
    with ThreadPoolExecutor(min(num_threads, len(parts))) as pool:
        return list(pool.map(kernel, parts))


def even_ranges(size: int, num_parts: int) -> list[range]:
    """``range(size)`` in up to ``num_parts`` consecutive ranges of about one length."""
    num_parts = max(1, min(size, num_parts))
    edges = [size * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
