"""How long each part of a step takes, without waiting for the device in any step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Clock(Protocol):
    """Marks moments of the device's work, and says later how far apart they were."""

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
    """On a GPU, a call only queues work; an event in the queue tells when it came to it."""

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
