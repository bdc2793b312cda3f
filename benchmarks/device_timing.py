"""Timing single operations on a GPU, by events on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median by events on the device, after three runs that do not count."""
    times = []
    for number in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
