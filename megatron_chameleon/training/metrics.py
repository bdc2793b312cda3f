"""What is measured over a log interval, and how long each phase of a step takes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.step import StepResult, counts_losses

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Interval:
    """Losses over the steps since the last log, summed over all ranks.

    Losses are of the steps that were not skipped, and NaN where there is none. ``domain_tokens``
    counts the tokens that have a loss, ``domain_tokens_drawn`` all that were read, skipped steps
    included. ``grad_norm`` is of the last step that was not skipped. ``memory_bytes`` is of the
    rank that takes most.
    """

    loss: float
    domain_loss: dict[str, float]
    domain_tokens: dict[str, int]
    domain_tokens_drawn: dict[str, int]
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int


class IntervalMeter:
    """Accumulate steps until they are logged, on the device."""

    def __init__(self, domain_names: Sequence[str], layout: Layout) -> None:
        self._names = list(domain_names)
        self._layout = layout
        self._restart()

    def add(self, result: StepResult) -> None:
        """Count a step in; of a skipped one only the tokens that it drew."""
        if result.skipped:
            self._sums[:, 2] += result.domain_sums[:, 2]
            return
        self._sums += result.domain_sums
        self._grad_norm = result.grad_norm

    def read(self) -> Interval:
        """The interval's figures, the same on every rank; starts a new one."""
        losses, tokens, drawn = sum_over_ranks(self._sums, self._layout).cpu().T.tolist()
        seconds = time.perf_counter() - self._start
        interval = Interval(
            loss=sum(losses) / sum(tokens) if any(tokens) else math.nan,
            domain_loss=mean_losses(self._names, losses, tokens),
            domain_tokens=self._counts(tokens),
            domain_tokens_drawn=self._counts(drawn),
            grad_norm=self._grad_norm,
            tokens_per_second=sum(drawn) / seconds,
            memory_bytes=most_memory_bytes(self._layout.device),
        )
        self._restart()
        return interval

    def domain_losses(self, domain_sums: torch.Tensor) -> dict[str, float]:
        """Domain -> mean loss of its tokens in one step, over all ranks; every rank calls this."""
        losses, tokens, _ = sum_over_ranks(domain_sums, self._layout).cpu().T.tolist()
        return mean_losses(self._names, losses, tokens)

    def _counts(self, numbers: list[float]) -> dict[str, int]:
        return {name: int(n) for name, n in zip(self._names, numbers, strict=True) if n}

    def restart_clock(self) -> None:
        """Leave the time up to now, spent on something else than steps, out of the speed."""
        self._start = time.perf_counter()

    def _restart(self) -> None:
        shape = (len(self._names), 3)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self._layout.device)
        self._grad_norm = math.nan
        self.restart_clock()


def sum_over_ranks(domain_sums: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[k, 3] sums per domain of each rank's micro-batches, over all ranks, on every rank."""
    sums = domain_sums.clone() if counts_losses(layout) else torch.zeros_like(domain_sums)
    dist.all_reduce(sums)
    return sums


def mean_losses(
    names: Sequence[str], losses: Sequence[float], tokens: Sequence[float]
) -> dict[str, float]:
    """Domain -> its summed loss over its number of tokens; those without tokens are left out."""
    return {name: loss / n for name, loss, n in zip(names, losses, tokens, strict=True) if n}


def memory_bytes(device: torch.device) -> int:
    """Most that tensors took on a GPU since the start; on the CPU, what the process has now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def most_memory_bytes(device: torch.device) -> int:
    """:func:`memory_bytes` of the rank that takes most; every rank calls this."""
    mine = torch.tensor(memory_bytes(device), dtype=torch.int64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return int(mine)


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast an interval was.

    Attributes:
        tflops: 10**12 floating-point operations a second and device, counted from shapes.
        mfu: share of the device's peak that these are (model FLOPs utilization: Chowdhery et al.
            2022, "PaLM", appendix B); None in float32, or where the peak is not known.
    """

    tflops: float
    mfu: float | None = None


def progress_line(
    step: int,
    train_iters: int,
    lr: float,
    interval: Interval,
    speed: Speed,
    skipped_steps: int,
    left: float,
) -> str:
    """One line for the terminal; ``left`` is in seconds."""
    width = len(str(train_iters))
    parts = [
        f"step {step:{width}d}/{train_iters}",
        f"loss {interval.loss:.4f}",
        f"lr {lr:.2e}",
        f"grad norm {interval.grad_norm:.2f}",
        f"{interval.tokens_per_second:,.0f} tokens/s",
        f"{speed.tflops:.3g} TFLOP/s",
        *([f"{speed.mfu:.1%} MFU"] if speed.mfu is not None else []),
        *([f"{skipped_steps} skipped"] if skipped_steps else []),
        f"{duration(left)} left",
    ]
    return " | ".join(parts)


def validation_line(step: int, train_iters: int, losses: Mapping[str, float]) -> str:
    """One line of validation losses for the terminal."""
    width = len(str(train_iters))
    said = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return f"validation after step {step:{width}d}/{train_iters} | loss {said}"


def duration(seconds: float) -> str:
    """'42 s', '3 min 05 s', '2 h 07 min' or '3 d 04 h'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left:02d} h"
    if hours:
        return f"{hours} h {minutes_left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Clock(Protocol):
    """Measures the time between two marks in the device's work."""

    def mark(self) -> Any:
        """The present moment."""

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks; may wait for the device."""


class HostClock:
    """On the CPU, work is done when the call returns."""

    def mark(self) -> float:
        """The present moment, in seconds."""
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        """Between two marks."""
        return last - first


class DeviceClock:
    """CUDA events, since GPU calls are asynchronous."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all that is queued at present."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Between two events, once the device has come to the second."""
        last.synchronize()
        return first.elapsed_time(last) / 1000


class PhaseTimers:
    """Adds up the seconds of each phase of training until they are read.

    forward_backward, optimizer and mixture (a hook's work on changing it) are phases of the
    device's work. data is what this process spends on making batches; a GPU may compute meanwhile,
    and if it does not, the wait is within forward_backward too. The others are phases in which this
    process does nothing else.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = DeviceClock() if device.type == "cuda" else HostClock()
        self._last_mark: Any = None
        self._laps: list[tuple[str, Any, Any]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        """The next lap begins here."""
        self._last_mark = self._clock.mark()

    def lap(self, phase: str) -> None:
        """What the device did since the last lap, or the start, was ``phase``."""
        mark = self._clock.mark()
        self._laps.append((phase, self._last_mark, mark))
        self._last_mark = mark

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What this process does within the block is ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def timed(self, items: Iterator[T], phase: str) -> Iterator[T]:
        """``items``, where making each is ``phase``."""
        while True:
            with self.during(phase):
                item = next(items, None)
            if item is None:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Phase -> seconds since the last reading, in the order of the phases' names."""
        for phase, first, last in self._laps:
            self._seconds[phase] += self._clock.seconds(first, last)
        found = dict(sorted(self._seconds.items()))
        self._laps, self._seconds = [], defaultdict(float)
        return found
