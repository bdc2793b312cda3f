"""Where a run's figures go: JSON lines always, TensorBoard by default, W&B where it is set up."""

from __future__ import annotations

import contextlib
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
from megatron_chameleon.artifacts.provenance import plain_options
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.logging import LoggingOptions
from megatron_chameleon.options.training import PretrainOptions

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Figures = Mapping[str, Any]
"""Name -> number, text, or figures again; numbers that are not finite were not measured."""

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_NAME = "wandb-id.txt"
STEP = "step"
"""What W&B draws all else over."""


class Logger(Protocol):
    """One place that figures go to."""

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
            with contextlib.suppress(OSError):  # it has been told
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
    """A run at Weights & Biases, which a continued run goes on with."""

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
                config=plain_options(options),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases: {error}; set WANDB_MODE=offline, or unset WANDB_API_KEY and "
                "leave --wandb-project out"
            ) from error
        # By wandb's own count, which only rises, what a continued run does again would be left out.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, figures: Figures) -> None:
        """Send every number that is finite; one of a domain as in 'domain_loss/news'."""
        self._run.log({STEP: step, **dict(scalars(figures))})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_loggers(options: PretrainOptions, first_step: int) -> list[Logger]:
    """All places that the run's figures go to, after ``first_step`` steps. Called on one rank.

    A package that is missing is told once, and its place left out.
    """
    loggers: list[Logger] = [JsonLinesLogger(options.run_dir / METRICS_NAME)]
    if options.logging.tensorboard and _installed("tensorboard", "--no-tensorboard"):
        loggers.append(TensorBoardLogger(options.run_dir / TENSORBOARD_FOLDER, first_step))
    if wants_wandb(options.logging) and _installed("wandb", "no --wandb-project, no WANDB_API_KEY"):
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
    """``value`` with None for numbers that are not finite, which JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wants_wandb(options: LoggingOptions) -> bool:
    """Whether figures are sent to Weights & Biases, where that is installed."""
    return options.wandb_project is not None or bool(os.environ.get("WANDB_API_KEY"))


def _installed(package: str, way_out: str) -> bool:
    if importlib.util.find_spec(package) is not None:
        return True
    warnings.warn(
        f"{package} is not installed, so nothing is written for it; install it, or give {way_out}",
        stacklevel=3,
    )
    return False


def _wandb_id(run_dir: Path) -> str:
    """The name by which a continued run finds itself again."""
    path = run_dir / WANDB_ID_NAME
    if not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    return path.read_text(encoding="utf-8", errors="replace").strip()
