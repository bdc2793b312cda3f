"""Destinations of metrics: JSON lines, TensorBoard and Weights & Biases."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.metrics import finite
from megatron_chameleon.training.options import PretrainOptions

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Figures = Mapping[str, Any]
"""Name -> number, text, list or nested mapping; NaN for a number that was not measured."""


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
            OSError: if it cannot be written; later calls may succeed.
        """
        line = json.dumps(finite({"step": step, **figures}), ensure_ascii=False, allow_nan=False)
        self._unwritten += line.encode() + b"\n"
        self.close()

    def close(self) -> None:
        """Append all unwritten lines, or none of them."""
        if not self._unwritten:
            return
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
        first_step: steps done; metrics that an earlier start logged of later steps are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open, self._folder, self._logged_step = SummaryWriter, folder, first_step
        self._writer: SummaryWriter | None = None

    def log(self, step: int, figures: Figures) -> None:
        """Write every finite number; nested names are joined, as in 'domain_loss/news'."""
        writer, self._writer = self._writer, None  # an OSError ends the writer's thread
        writer = writer or self._open(self._folder, purge_step=self._logged_step + 1)
        self._logged_step = step
        for name, value in scalars(figures):
            writer.add_scalar(name, value, step)
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        """Close the event file."""
        if self._writer:
            self._writer.close()


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


Logger = JsonLinesLogger | TensorBoardLogger | WandbLogger


def open_loggers(options: PretrainOptions, first_step: int) -> list[Logger]:
    """Open the run's loggers, on one rank, after ``first_step`` steps.

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
