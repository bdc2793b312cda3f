"""What is logged: one JSON line and one readable line per interval, on rank 0."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_chameleon.artifacts.files import cannot_write
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.step import StepResult


@dataclasses.dataclass(frozen=True)
class Interval:
    """Losses over the steps since the last log, summed over all ranks.

    ``domain_tokens`` counts the tokens that have a loss, ``domain_tokens_drawn`` all that were
    read.
    """

    loss: float
    domain_loss: dict[str, float]
    domain_tokens: dict[str, int]
    domain_tokens_drawn: dict[str, int]
    grad_norm: float
    tokens_per_second: float


class IntervalMeter:
    """Adds up steps until they are logged. Losses stay on the device in between."""

    def __init__(self, domain_names: Sequence[str], layout: Layout) -> None:
        self._names = list(domain_names)
        self._layout = layout
        self._restart()

    def add(self, result: StepResult) -> None:
        """Count a step in."""
        self._sums += result.domain_sums
        self._grad_norm = result.grad_norm

    def read(self) -> Interval:
        """The interval's figures, the same on every rank; starts a new one."""
        # Tensor-parallel ranks of the last stage all hold the same sums: one of them speaks.
        mine = self._layout.is_last_stage and self._layout.tensor_rank == 0
        sums = self._sums if mine else torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        losses, tokens, drawn = sums.cpu().T.tolist()
        seconds = time.perf_counter() - self._start
        interval = Interval(
            loss=sum(losses) / sum(tokens) if any(tokens) else math.nan,
            domain_loss={
                name: loss / n
                for name, loss, n in zip(self._names, losses, tokens, strict=True)
                if n
            },
            domain_tokens=self._counts(tokens),
            domain_tokens_drawn=self._counts(drawn),
            grad_norm=self._grad_norm,
            tokens_per_second=sum(drawn) / seconds,
        )
        self._restart()
        return interval

    def _counts(self, numbers: list[float]) -> dict[str, int]:
        return {name: int(n) for name, n in zip(self._names, numbers, strict=True) if n}

    def restart_clock(self) -> None:
        """Leave the time up to now, spent on something else than steps, out of the speed."""
        self._start = time.perf_counter()

    def _restart(self) -> None:
        shape = (len(self._names), 3)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self._layout.device)
        self._grad_norm = 0.0
        self.restart_clock()


def append_metrics(path: Path, record: dict[str, Any]) -> None:
    """Add one line to a metrics file.

    Raises:
        UserError: if the disk is full or refuses.
    """
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def progress_line(step: int, train_iters: int, lr: float, interval: Interval, left: float) -> str:
    """One line a person can read; ``left`` is in seconds."""
    width = len(str(train_iters))
    return (
        f"step {step:{width}d}/{train_iters} | loss {interval.loss:.4f} | lr {lr:.2e} | "
        f"grad norm {interval.grad_norm:.2f} | {interval.tokens_per_second:,.0f} tokens/s | "
        f"{duration(left)} left"
    )


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
