"""Destinations of metrics: JSON lines, TensorBoard, Weights & Biases; and the log of a run."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_chameleon.artifacts.files import cannot_write, replacing
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import dense_bf16_peak, model_flops_utilization, training_flops
from megatron_chameleon.parallel.layout import device_name, from_main
from megatron_chameleon.training.guard import StepGuard
from megatron_chameleon.training.metrics import (
    Interval,
    IntervalMeter,
    PhaseTimers,
    finite,
    format_duration,
)
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.run_folder import RunRecords

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Figures = Mapping[str, Any]
"""Name -> number, text, list or nested mapping; NaN for a number that was not measured."""


class Logger(Protocol):
    """Destination of metrics."""

    def log(self, step: int, figures: Figures) -> None:
        """Write the metrics of an interval that ended with ``step``."""

    def close(self) -> None:
        """Flush and close."""


class JsonLinesLogger:
    """Append one line of JSON per interval to metrics.jsonl.

    Lines that do not fit on a full disk are written with the next ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""

    def log(self, step: int, figures: Figures) -> None:
        """Append a line: the step first, null for NaN and infinities.

        Raises:
            UserError: if the file does not exist and cannot be created.
        """
        line = json.dumps(finite({"step": step, **figures}), ensure_ascii=False, allow_nan=False)
        self._unwritten += line.encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            problem = cannot_write(self._path, error)
            if not self._path.exists():
                raise problem from error
            warnings.warn(f"{problem}; retrying at the next log interval", stacklevel=2)

    def close(self) -> None:
        """Write the remaining lines, if there is space now."""
        if self._unwritten:
            with contextlib.suppress(OSError):  # already reported
                self._append()

    def _append(self) -> None:
        """Append all unwritten lines, or none of them."""
        with self._path.open("ab", buffering=0) as stream:
            end = stream.tell()
            if stream.write(self._unwritten) < len(self._unwritten):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""


class TensorBoardLogger:
    """Write event files for TensorBoard.

    Metrics that do not fit on a full disk are dropped; once there is space, a new file follows.

    Args:
        folder: folder of the event files.
        first_step: earlier metrics of later steps are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        with self._dropping_on_error():
            self._open(first_step)

    def log(self, step: int, figures: Figures) -> None:
        """Write every finite number; nested names are joined, as in 'domain_loss/news'."""
        with self._dropping_on_error():
            writer = self._writer or self._open(step - 1)
            for name, value in scalars(figures):
                writer.add_scalar(name, value, step)
            writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer:
            with self._dropping_on_error():
                self._writer.close()

    def _open(self, first_step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=first_step + 1)
        return self._writer

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """Turn an OSError, which ends the writer's thread, into a warning."""
        try:
            yield
        except OSError as error:
            self._writer = None
            problem = cannot_write(self._folder, error)
            warnings.warn(f"{problem}; these metrics are dropped", stacklevel=4)


class WandbLogger:
    """Log to a Weights & Biases run, which is continued when training is resumed.

    Raises:
        UserError: if Weights & Biases rejects the run.
    """

    def __init__(self, options: PretrainOptions) -> None:
        import wandb

        id_file = options.run_dir / "wandb-id.txt"
        if not id_file.exists():
            with replacing(id_file) as temporary:
                temporary.write_text(uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                project=options.logging.wandb_project,
                name=options.logging.wandb_exp_name or options.run_dir.name,
                id=id_file.read_text(encoding="utf-8", errors="replace").strip(),
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Figures) -> None:
        """Send every finite number; nested names are joined, as in 'domain_loss/news'."""
        self._run.log({"step": step, **dict(scalars(figures))})

    def close(self) -> None:
        """Send the remaining metrics."""
        self._run.finish()


def open_loggers(options: PretrainOptions, first_step: int) -> list[Logger]:
    """Open the run's loggers, after ``first_step`` steps. Called on one rank.

    A logger whose package is missing is skipped with a warning.
    """
    loggers: list[Logger] = [JsonLinesLogger(options.run_dir / METRICS_NAME)]
    if options.logging.tensorboard and _installed("tensorboard", "--no-tensorboard"):
        loggers.append(TensorBoardLogger(options.run_dir / "tensorboard", first_step))
    if options.logging.uses_wandb and _installed("wandb", "no --wandb-project, no WANDB_API_KEY"):
        loggers.append(WandbLogger(options))
    return loggers


def _installed(package: str, without: str) -> bool:
    installed = importlib.util.find_spec(package) is not None
    if not installed:
        warnings.warn(
            f"no metrics for {package}, which is not installed; install it, or pass {without}",
            stacklevel=3,
        )
    return installed


def scalars(figures: Figures, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Name and value of every finite number; names of nested mappings are joined by '/'."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


class RunLog:
    """Measure the intervals between two logs; print and write them on rank 0.

    Attributes:
        meter: losses and tokens since the last log.
        phases: timers of the training phases.
    """

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self.meter = IntervalMeter(records.plan.data.names, records.layout)
        self.phases = PhaseTimers(records.layout.device)
        self._loggers: list[Logger] = []

    def open(self) -> None:
        """Open the loggers. Collective.

        Raises:
            UserError: on every rank, if one cannot be opened.
        """
        records = self._records

        def open_all() -> None:
            self._loggers = open_loggers(records.plan.options, records.first_step)

        from_main(open_all)

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()

    def read(self, step: int) -> Interval:
        """The measurements of the interval that ends with ``step``. Collective."""
        interval = self.meter.read()
        self._records.count(step, interval.domain_tokens_drawn)
        return interval

    def write(
        self,
        step: int,
        interval: Interval,
        lr: float,
        guard: StepGuard,
        validation_loss: Mapping[str, float],
        hook: Mapping[str, Any] | None,
    ) -> None:
        """Print and write an interval, on rank 0; its time is excluded from the speed.

        Args:
            step: steps done.
            interval: measurements since the last log.
            lr: learning rate of the last step.
            guard: counts of skipped steps.
            validation_loss: domain -> loss; empty without a validation after this step.
            hook: metrics of the training hook, if any.
        """
        records, plan, layout = self._records, self._records.plan, self._records.layout
        phase_seconds, skipped = self.phases.read(), guard.unlogged
        guard.unlogged = []
        flops_per_token = training_flops(plan.shape, 1, plan.options.seq_length)
        tokens_per_second = interval.tokens_per_second / layout.world_size
        tflops = flops_per_token * tokens_per_second / 1e12
        # Peaks are known for bfloat16 only.
        peak = dense_bf16_peak(device_name(layout.device)) if plan.options.bf16 else None
        mfu = model_flops_utilization(flops_per_token, tokens_per_second, peak)
        figures = {
            "tokens": step * plan.tokens_per_step,
            "lr": lr,
            "seconds": round(records.seconds(), 3),
            **dataclasses.asdict(interval),
            **({"validation_loss": dict(validation_loss)} if validation_loss else {}),
            "skipped_steps": guard.skipped,
            **({"skipped": [dataclasses.asdict(s) for s in skipped]} if skipped else {}),
            "tflops_per_second_per_device": tflops,
            **({"mfu": mfu} if mfu is not None else {}),
            **({"hook": dict(hook)} if hook else {}),
            "drawn": {
                name: {"asked": round(d.target), "got": d.actual, "epochs": round(d.epochs, 4)}
                for name, d in records.sampled().items()
            },
            "phase_seconds": phase_seconds,
        }
        last = plan.options.train_iters
        done = f"step {step:{len(str(last))}d}/{last}"
        seconds_per_step = records.stopwatch.seconds() / (step - records.first_step)
        line = [
            done,
            f"loss {interval.loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {interval.grad_norm:.2f}",
            f"{interval.tokens_per_second:,.0f} tokens/s",
            f"{tflops:.3g} TFLOP/s",
            *([f"{mfu:.1%} MFU"] if mfu is not None else []),
            *([f"{guard.skipped} skipped"] if guard.skipped else []),
            f"{format_duration(seconds_per_step * (last - step))} left",
        ]
        if layout.is_main:
            with self.phases.during("logging"):
                print(" | ".join(line))
                if validation_loss:
                    losses = (f"{name} {loss:.4f}" for name, loss in validation_loss.items())
                    print(f"validation after {done} | loss {', '.join(losses)}")
                for logger in self._loggers:
                    logger.log(step, figures)
        self.meter.restart_clock()
