"""Write the metrics of each log interval: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import json
import math
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_chameleon.artifacts.files import cannot_write, replacing
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import dense_bf16_peak, model_flops_utilization, training_flops
from megatron_chameleon.parallel.layout import device_name, from_main
from megatron_chameleon.training.guard import SkippedStep
from megatron_chameleon.training.metrics import (
    Interval,
    IntervalMeter,
    PhaseTimers,
    Speed,
    progress_line,
    validation_line,
)
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.records import RunRecords

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Figures = Mapping[str, Any]
"""Name -> number, text, or figures again; numbers that are not finite were not measured."""

TENSORBOARD_FOLDER = "tensorboard"

WANDB_ID_NAME = "wandb-id.txt"

STEP = "step"
"""Name of the x-axis in W&B."""


class Logger(Protocol):
    """Destination of metrics."""

    def log(self, step: int, figures: Figures) -> None:
        """Write the figures of an interval that ended with ``step``."""

    def close(self) -> None:
        """Write out what is left."""


class JsonLinesLogger:
    """One line of JSON an interval, in metrics.jsonl.

    Lines for which there is no room wait for the next ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""

    def log(self, step: int, figures: Figures) -> None:
        """Add a line, with the step first and null for what is not finite.

        Raises:
            UserError: if there is no file yet and none can be made.
        """
        line = json.dumps(finite({"step": step, **figures}), ensure_ascii=False, allow_nan=False)
        self._waiting += line.encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not self._path.exists():
                raise cannot_write(self._path, error) from error
            warnings.warn(f"{cannot_write(self._path, error)}; lines wait till then", stacklevel=2)

    def close(self) -> None:
        """Write the lines that wait, if there is room now."""
        if self._waiting:
            with contextlib.suppress(OSError):  # already reported
                self._append()

    def _append(self) -> None:
        """Write all lines that wait, or none of them."""
        with self._path.open("ab", buffering=0) as stream:
            end = stream.tell()
            if stream.write(self._waiting) < len(self._waiting):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._waiting = b""


class TensorBoardLogger:
    """Event files for TensorBoard.

    Figures for which there is no room are left out; once there is, a new file goes on.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Write to ``folder``; what it holds of steps after ``first_step`` is no longer shown."""
        self._folder = folder
        self._writer: SummaryWriter | None = None
        try:
            self._writer = self._open(first_step)
        except OSError as error:
            self._leave_out(error)

    def log(self, step: int, figures: Figures) -> None:
        """Write every number that is finite; one of a domain as in 'domain_loss/news'."""
        try:
            self._writer = self._writer or self._open(step - 1)
            for name, value in scalars(figures):
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:  # which has ended the writer's thread
            self._leave_out(error)

    def close(self) -> None:
        """Close the event file."""
        try:
            if self._writer:
                self._writer.close()
        except OSError as error:
            warnings.warn(f"{cannot_write(self._folder, error)}; the last are lost", stacklevel=2)

    def _leave_out(self, error: OSError) -> None:
        self._writer = None
        warnings.warn(f"{cannot_write(self._folder, error)}; left out till then", stacklevel=3)

    def _open(self, first_step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=first_step + 1)


class WandbLogger:
    """A Weights & Biases run; a resumed run continues it."""

    def __init__(self, options: PretrainOptions) -> None:
        """Join the run.

        Raises:
            UserError: if Weights & Biases refuses, with its own words.
        """
        import wandb

        try:
            self._run = wandb.init(
                project=options.logging.wandb_project,
                name=options.logging.wandb_exp_name or options.run_dir.name,
                id=_wandb_id(options.run_dir),
                dir=options.run_dir,
                config=json_values(options),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases: {error}; set WANDB_MODE=offline, or unset WANDB_API_KEY and "
                "leave --wandb-project out"
            ) from error
        # wandb's own step only increases, so it would drop steps repeated after a resume.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, figures: Figures) -> None:
        """Send every number that is finite; one of a domain as in 'domain_loss/news'."""
        self._run.log({STEP: step, **dict(scalars(figures))})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_loggers(options: PretrainOptions, first_step: int) -> list[Logger]:
    """Open the run's loggers, after ``first_step`` steps. Called on one rank.

    A logger whose package is missing is skipped with a warning.
    """
    loggers: list[Logger] = [JsonLinesLogger(options.run_dir / METRICS_NAME)]
    if options.logging.tensorboard and _installed("tensorboard", "--no-tensorboard"):
        loggers.append(TensorBoardLogger(options.run_dir / TENSORBOARD_FOLDER, first_step))
    if options.logging.uses_wandb and _installed("wandb", "no --wandb-project, no WANDB_API_KEY"):
        loggers.append(WandbLogger(options))
    return loggers


def scalars(figures: Figures, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Name and value of every finite number; names of nested figures are joined by '/'."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def finite(value: Any) -> Any:
    """``value`` with None for NaN and infinities, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _installed(package: str, without: str) -> bool:
    if importlib.util.find_spec(package) is not None:
        return True
    warnings.warn(
        f"{package} is not installed, so nothing is written for it; install it, or pass {without}",
        stacklevel=3,
    )
    return False


def _wandb_id(run_dir: Path) -> str:
    """The run's id at Weights & Biases, kept in the run folder for resuming."""
    path = run_dir / WANDB_ID_NAME
    if not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    return path.read_text(encoding="utf-8", errors="replace").strip()


@dataclasses.dataclass(frozen=True)
class LogState:
    """Where a run stands when it logs.

    Attributes:
        step: steps done.
        lr: the learning rate of the last one.
        skipped_steps: steps of the whole run that did not update the model.
        skipped: those of them since the last log.
        validation_loss: domain -> loss, where this step was followed by a validation.
        hook: metrics of the training hook, if any.
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
        meter: accumulates losses and tokens of every step.
        phases: timers of the training phases.
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

    def write(self, interval: Interval, standing: LogState) -> None:
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

    def _write(self, interval: Interval, standing: LogState, phases: dict[str, float]) -> None:
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

    def _figures(self, interval: Interval, standing: LogState, speed: Speed) -> dict[str, Any]:
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
