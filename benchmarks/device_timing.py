"""Timing of single GPU operations with CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds by CUDA events, after three warm-up runs."""
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
