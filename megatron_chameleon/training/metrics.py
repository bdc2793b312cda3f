"""What is measured over an interval of steps, and the line that a person reads of it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import psutil
import torch
import torch.distributed as dist

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.agreement import speaks
from megatron_chameleon.training.step import StepResult


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
    """Adds up steps until they are logged. Losses stay on the device in between."""

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
    sums = domain_sums.clone() if speaks(layout) else torch.zeros_like(domain_sums)
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
    """One line a person can read; ``left`` is in seconds."""
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
    """The same of a validation."""
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
