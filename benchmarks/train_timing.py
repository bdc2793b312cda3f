"""Timing of contestants: consecutively on a GPU, interleaved on a CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.train_contestants import Case, Contestant
from megatron_chameleon.model.flops import model_flops_utilization, training_flops

Make = Callable[[], Contestant]


def step_seconds(
    contestant: Contestant, micro_batch_size: int, warm_up: int, repeats: int
) -> list[float]:
    """Seconds of each of ``repeats`` steps after ``warm_up`` steps, with synchronization."""
    marks: list[float] = []

    def mark() -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    contestant.run(micro_batch_size, warm_up + repeats, mark)
    return [end - begin for begin, end in zip(marks[warm_up - 1 :], marks[warm_up:], strict=False)]


def free_memory() -> None:
    """Free the memory of the last contestant, also after it ran out of memory."""
    gc.collect()
    torch.cuda.empty_cache()


def best_micro_batch(
    contestant: Contestant, case: Case, tokens: tuple[int, ...]
) -> tuple[int, dict[int, float]]:
    """The fastest micro-batch size, and tokens/s of each size measured.

    Sizes, by ``tokens`` per micro-batch, increase until one does not fit or is slower than the
    previous one.

    Raises:
        torch.OutOfMemoryError: if not even the smallest fits.
    """
    speeds: dict[int, float] = {}
    for size in (max(1, n // case.seq_length) for n in tokens):
        try:
            seconds = step_seconds(contestant, size, warm_up=1, repeats=2)
        except torch.OutOfMemoryError:
            free_memory()
            if not speeds:
                raise
            break
        taken = case.num_microbatches(size) * size * case.seq_length
        speeds[size] = taken / min(seconds)
        if speeds[size] < max(speeds.values()):
            break
    return max(speeds, key=speeds.__getitem__), speeds


def timed_at_its_best(
    make: Make, case: Case, tokens: tuple[int, ...], peak: float | None, repeats: int
) -> dict[str, Any]:
    """Figures of one contestant at its fastest micro-batch size, and the speed of each size."""
    contestant = make()
    try:
        size, speeds = best_micro_batch(contestant, case, tokens)
        seconds, memory = _with_peak(partial(step_seconds, contestant, size, 2, repeats))
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        del contestant
        free_memory()
    measured = {"peak_memory_gb": memory, "tokens_per_second_by_micro_batch": speeds}
    return figures(case, size, seconds, peak) | measured


def _with_peak(run: Callable[[], list[float]]) -> tuple[list[float], float | None]:
    """The result of ``run``, and its peak GB on the device; None on a CPU."""
    if not torch.cuda.is_available():
        return run(), None
    torch.cuda.reset_peak_memory_stats()
    return run(), torch.cuda.max_memory_allocated() / 1e9


def timed_in_turn(
    contestants: Mapping[str, Contestant],
    case: Case,
    micro_batch_size: int,
    peak: float | None,
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Figures of all contestants, interleaved, so that other load affects all of them."""
    for contestant in contestants.values():
        contestant.run(micro_batch_size, 2, lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            begin = time.perf_counter()
            contestant.run(micro_batch_size, 1, lambda: None)
            seconds[name].append(time.perf_counter() - begin)
    return {name: figures(case, micro_batch_size, s, peak) for name, s in seconds.items()}


def figures(
    case: Case, micro_batch_size: int, seconds: list[float], peak: float | None
) -> dict[str, Any]:
    """Medians in the units to compare; MFU is null if the device's peak is unknown."""
    tokens = case.num_microbatches(micro_batch_size) * micro_batch_size * case.seq_length
    speed = tokens / statistics.median(seconds)
    per_token = training_flops(case.shape, 1, case.seq_length)
    return {
        "micro_batch_size": micro_batch_size,
        "tokens_per_step": tokens,
        "seconds": seconds,
        "tokens_per_second": speed,
        "model_tflops": per_token * speed / 1e12,
        "mfu": model_flops_utilization(per_token, speed, peak),
    }
