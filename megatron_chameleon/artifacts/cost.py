"""What a stage cost: floating-point operations counted from shapes, and device time."""

from __future__ import annotations

import dataclasses
import time

from megatron_chameleon.artifacts.record import Amount, Count


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one stage. Costs of stages add up.

    Attributes:
        flops: floating-point operations, counted from the model's shapes (0 where no model ran).
        device_seconds: wall seconds times the number of devices that were held.
        wall_seconds: seconds on the clock, start-up of the process excluded.
        num_devices: devices (GPUs, or CPU ranks) held.
    """

    flops: float = 0.0
    device_seconds: Amount = 0.0
    wall_seconds: Amount = 0.0
    num_devices: Count = 1

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            flops=self.flops + other.flops,
            device_seconds=self.device_seconds + other.device_seconds,
            wall_seconds=self.wall_seconds + other.wall_seconds,
            num_devices=max(self.num_devices, other.num_devices),
        )


class Stopwatch:
    """Starts when made; :meth:`cost` says what has been spent since."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds on the clock since the start."""
        return time.perf_counter() - self._start

    def cost(self, flops: float = 0.0, num_devices: int = 1) -> Cost:
        """The cost since the start, for ``flops`` operations on ``num_devices`` devices."""
        seconds = self.seconds()
        return Cost(flops, seconds * num_devices, seconds, num_devices)
