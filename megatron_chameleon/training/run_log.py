"""What is measured over each log interval, and sent to every logger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_chameleon.model.device_peak import dense_bf16_peak, model_flops_utilization
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.parallel.layout import device_name, from_main
from megatron_chameleon.training.loggers import Logger, open_loggers
from megatron_chameleon.training.metrics import (
    Interval,
    IntervalMeter,
    Speed,
    progress_line,
    validation_line,
)
from megatron_chameleon.training.phase_timers import PhaseTimers
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.skipped import SkippedStep


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a run stands when it logs.

    Attributes:
        step: steps done.
        lr: the learning rate of the last one.
        skipped_steps: steps of the whole run that did not update the model.
        skipped: those of them since the last log.
        validation_loss: domain -> loss, where this step was followed by a validation.
        hook: what the method that watches the run has to say, if one does.
    """

    step: int
    lr: float
    skipped_steps: int = 0
    skipped: Sequence[SkippedStep] = ()
    validation_loss: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hook: Mapping[str, Any] | None = None


class RunLog:
    """Meters what happens between two logs; rank 0 writes it down.

    Attributes:
        meter: is told of every step.
        phases: times what is done.
    """

    def __init__(self, records: RunRecords) -> None:
        self._records, self._layout = records, records.layout
        self.meter = IntervalMeter(records.plan.data.names, records.layout)
        self.phases = PhaseTimers(records.layout.device)
        self._loggers: list[Logger] = []

    def open(self) -> None:
        """Open what is written to. Every rank calls this.

        Raises:
            UserError: on every rank, if rank 0 cannot.
        """
        from_main(self._open)
        self.meter.restart_clock()

    def read(self, step: int) -> Interval:
        """The figures of the interval that ends with ``step``; every rank calls this."""
        interval = self.meter.read()
        self._records.count(step, interval.domain_tokens_drawn)
        return interval

    def write(self, interval: Interval, standing: Standing) -> None:
        """Write and print the figures, on rank 0. The time that this takes is not the next steps'.

        Raises:
            UserError: if the disk is full or refuses.
        """
        seconds = self.phases.read()
        if self._layout.is_main:
            with self.phases.during("logging"):
                self._write(interval, standing, seconds)
        self.meter.restart_clock()

    def close(self) -> None:
        """Write out what is left."""
        for logger in self._loggers:
            logger.close()

    def _open(self) -> None:
        self._loggers = open_loggers(self._records.plan.options, self._records.first_step)

    def _write(self, interval: Interval, standing: Standing, phases: dict[str, float]) -> None:
        speed, train_iters = self._speed(interval), self._records.plan.options.train_iters
        print(
            progress_line(
                standing.step,
                train_iters,
                standing.lr,
                interval,
                speed,
                standing.skipped_steps,
                self._seconds_left(standing.step),
            )
        )
        if standing.validation_loss:
            print(validation_line(standing.step, train_iters, standing.validation_loss))
        figures = self._figures(interval, standing, speed)
        for logger in self._loggers:
            logger.log(standing.step, {**figures, "phase_seconds": phases})

    def _figures(self, interval: Interval, standing: Standing, speed: Speed) -> dict[str, Any]:
        skipped, validation = standing.skipped, standing.validation_loss
        return {
            "tokens": standing.step * self._records.plan.tokens_per_step,
            "lr": standing.lr,
            "seconds": round(self._records.seconds(), 3),
            **dataclasses.asdict(interval),
            **({"validation_loss": dict(validation)} if validation else {}),
            "skipped_steps": standing.skipped_steps,
            **({"skipped": [step.record() for step in skipped]} if skipped else {}),
            "tflops_per_second_per_device": speed.tflops,
            **({"mfu": speed.mfu} if speed.mfu is not None else {}),
            **({"hook": dict(standing.hook)} if standing.hook else {}),
            "drawn": {
                name: {"asked": round(d.asked), "got": d.got, "epochs": round(d.epochs, 4)}
                for name, d in self._records.drawn().items()
            },
        }

    def _speed(self, interval: Interval) -> Speed:
        plan = self._records.plan
        flops_per_token = training_flops(plan.shape, 1, plan.options.seq_length)
        tokens_per_second = interval.tokens_per_second / self._layout.world_size
        # The peak that is known is bfloat16's.
        peak = dense_bf16_peak(device_name(self._layout.device)) if plan.options.bf16 else None
        return Speed(
            flops_per_token * tokens_per_second / 1e12,
            model_flops_utilization(flops_per_token, tokens_per_second, peak),
        )

    def _seconds_left(self, step: int) -> float:
        done = step - self._records.first_step
        left = self._records.plan.options.train_iters - step
        return self._records.stopwatch.seconds() / done * left
