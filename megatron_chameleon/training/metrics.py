"""Metrics of training: losses of a log interval, phase timers, profiler and loggers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import json
import math
import os
import re
import time
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.provenance import recorded_options
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.step import StepResult, counts_losses

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

T = TypeVar("T")

Figures = Mapping[str, Any]
"""Name -> number, text, list or nested mapping; NaN for a number that was not measured."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Measurements of the steps since the last log, over all ranks.

    Attributes:
        loss: mean loss of the steps that were not skipped; NaN if all were skipped.
        domain_loss: mean loss of each domain in these steps.
        domain_tokens: each domain's tokens with a loss, excluding skipped steps.
        domain_tokens_sampled: each domain's sampled tokens, including skipped steps.
        grad_norm: gradient norm of the last step that was not skipped.
        tokens_per_second: tokens sampled per second, over all ranks.
        memory_bytes: largest memory of any rank, as measured by :func:`memory_bytes`.
    """

    loss: float
    domain_loss: dict[str, float]
    domain_tokens: dict[str, int]
    domain_tokens_sampled: dict[str, int]
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int


class IntervalMeter:
    """Accumulate losses and tokens on the device until they are logged.

    Attributes:
        steps: number of steps since the last :meth:`read`.
        sampled_tokens: domain -> tokens sampled up to the last :meth:`read`, over the whole run.
    """

    def __init__(self, domain_names: Sequence[str], layout: Layout) -> None:
        self._names, self._layout = list(domain_names), layout
        self.sampled_tokens: Counter[str] = Counter()
        self.steps = 0
        self._restart()

    def state_dict(self) -> dict[str, int]:
        """State for a checkpoint; call :meth:`read` first."""
        return dict(self.sampled_tokens)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.sampled_tokens = Counter(state)

    def add(self, result: StepResult) -> None:
        """Add a step. If it was skipped, add only its number of sampled tokens."""
        self.steps += 1
        if result.skip_reason is not None:
            self._sums[:, 2] += result.domain_sums[:, 2]
            return
        self._sums += result.domain_sums
        self._grad_norm = result.grad_norm

    def read(self) -> Interval:
        """Return the measurements of all ranks, and start a new interval. Collective."""
        losses, tokens, sampled = sum_over_ranks(self._sums, self._layout).cpu().T.tolist()
        seconds = time.perf_counter() - self._start
        interval = Interval(
            loss=sum(losses) / sum(tokens) if any(tokens) else math.nan,
            domain_loss=mean_losses(self._names, losses, tokens),
            domain_tokens=self._counts(tokens),
            domain_tokens_sampled=self._counts(sampled),
            grad_norm=self._grad_norm,
            tokens_per_second=sum(sampled) / seconds,
            memory_bytes=most_memory_bytes(self._layout.device),
        )
        self.sampled_tokens.update(interval.domain_tokens_sampled)
        self._restart()
        return interval

    def restart_clock(self) -> None:
        """Exclude the time up to now from the measured speed."""
        self._start = time.perf_counter()

    def _counts(self, numbers: list[float]) -> dict[str, int]:
        return {name: int(n) for name, n in zip(self._names, numbers, strict=True) if n}

    def _restart(self) -> None:
        shape = (len(self._names), 3)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self._layout.device)
        self._grad_norm, self.steps = math.nan, 0
        self.restart_clock()


def sum_over_ranks(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum of ``values`` over the replicas' last pipeline stages, on every rank. Collective."""
    sums = values.clone() if counts_losses(layout) else torch.zeros_like(values)
    dist.all_reduce(sums)
    return sums


def mean_losses(
    names: Sequence[str], losses: Sequence[float], tokens: Sequence[float]
) -> dict[str, float]:
    """Domain -> summed loss divided by number of tokens, for domains with tokens."""
    return {name: loss / n for name, loss, n in zip(names, losses, tokens, strict=True) if n}


def memory_bytes(device: torch.device) -> int:
    """Peak memory of tensors on a GPU since the start; on the CPU, the process's current memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def most_memory_bytes(device: torch.device) -> int:
    """Largest :func:`memory_bytes` of any rank. Collective."""
    mine = torch.tensor(memory_bytes(device), dtype=torch.int64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return int(mine)


class PhaseTimers:
    """Sum the seconds of each phase of training until they are read.

    forward_backward, optimizer and mixture (a hook's mixture change) are measured on the device,
    by CUDA events on a GPU. data is the time in which this process makes batches, possibly while a
    GPU computes. Training waits during all other phases, such as saving.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last_mark: Any = None
        self._laps: list[tuple[str, Any, Any]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        """Start the next lap."""
        self._last_mark = self._mark()

    def lap(self, phase: str) -> None:
        """Add the device's time since the last :meth:`lap` or :meth:`start` to ``phase``."""
        mark = self._mark()
        self._laps.append((phase, self._last_mark, mark))
        self._last_mark = mark

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Add the time that this process spends in the block to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def timed(self, items: Iterator[T], phase: str) -> Iterator[T]:
        """Iterate over ``items``; add the time that it takes to produce them to ``phase``."""
        while True:
            with self.during(phase):
                item = next(items, None)
            if item is None:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Phase -> seconds since the last call, sorted by name; may wait for the device."""
        for phase, first, last in self._laps:
            if self._on_gpu:
                last.synchronize()
                self._seconds[phase] += first.elapsed_time(last) / 1000
            else:
                self._seconds[phase] += last - first
        seconds = dict(sorted(self._seconds.items()))
        self._laps, self._seconds = [], defaultdict(float)
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def build_profiler(
    options: PretrainOptions, layout: Layout, first_step: int
) -> torch.profiler.profile | None:
    """Build the profiler of rank 0; None on other ranks and without ``--profile``.

    Enter the profiler as a context before the first step, and call its ``step`` after each step.
    The profiler writes the trace even if the run ends early. If the trace cannot be written, a
    warning is issued.

    Args:
        options: options of the run.
        layout: layout of the ranks.
        first_step: number of steps done when the run was started or resumed.
    """
    start = options.profiling.profile_step_start - first_step
    end = options.profiling.profile_step_end - first_step
    if not options.profiling.profile or not layout.is_main:
        return None
    if start < 0:
        warnings.warn(
            "--profile writes no trace: the run is past --profile-step-start", stacklevel=2
        )
        return None

    def action(step: int) -> ProfilerAction:
        if not start <= step < end:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD if step < end - 1 else ProfilerAction.RECORD_AND_SAVE

    def write(trace: torch.profiler.profile) -> None:
        if trace.step_num <= start:  # the run stopped before the first traced step
            return
        name = f"steps-{first_step + start + 1}-to-{first_step + trace.step_num}.json"
        try:
            with replacing(options.run_dir / "profile" / name) as temporary:
                trace.export_chrome_trace(os.fspath(temporary))
        except (OSError, UserError) as error:
            warnings.warn(f"--profile wrote no trace: {error}", stacklevel=2)

    return torch.profiler.profile(schedule=action, on_trace_ready=write)


class JsonLinesLogger:
    """Append one line of JSON per interval to metrics.jsonl.

    If the disk is full, lines are kept in memory and written later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""

    def log(self, step: int, figures: Figures) -> None:
        """Append a line with the step and ``figures``; NaN and infinities are written as null.

        Raises:
            OSError: if the line cannot be written; the next call tries again.
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

    If the disk is full, metrics are lost; later metrics are written to a new file.

    Args:
        folder: folder of the event files.
        first_step: number of steps done; metrics that an interrupted run logged for later steps are
            hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A run that starts again may log step 0 again.
        self._open, self._folder, self._logged_step = SummaryWriter, folder, first_step or -1
        self._writer: SummaryWriter | None = None

    def log(self, step: int, figures: Figures) -> None:
        """Write every finite number; nested names are joined, as in 'domain_loss/news'."""
        # An OSError ends the writer's thread, so the next call then opens a new writer.
        writer, self._writer = self._writer, None
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
    """Log to a Weights & Biases run; after a resume, log to the same run.

    Raises:
        UserError: if Weights & Biases rejects the run.
    """

    def __init__(self, options: PretrainOptions) -> None:
        import wandb

        run_id = kept_id(options.run_dir / "wandb-id.txt", lambda: uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                project=options.logging.wandb_project,
                name=options.logging.wandb_exp_name or options.run_dir.name,
                id=run_id,
                dir=options.run_dir,
                config=recorded_options(options),
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


class MlflowLogger:
    """Log to an MLflow run; after a resume, log to the same run.

    Raises:
        UserError: if MLflow rejects the run, or its server cannot be reached.
    """

    MAX_VALUE_LENGTH = 6000
    """MLflow's limit for the value of a parameter."""

    def __init__(self, options: PretrainOptions) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        # A call to a stopped server then takes 14 seconds instead of 4 minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        self._error, self._train_iters, self._step = MlflowException, options.train_iters, 0
        id_file = options.run_dir / "mlflow-id.txt"
        try:
            self._client = MlflowClient()
            self._id = kept_id(id_file, lambda: self._start(options))
            self._client.update_run(self._id, status="RUNNING")
        except MlflowException as error:
            raise UserError(
                f"MLflow: {first_line(error)}; check MLFLOW_TRACKING_URI, delete {id_file} to log "
                "to a new MLflow run, or leave --mlflow-experiment out"
            ) from error

    def _start(self, options: PretrainOptions) -> str:
        """Create the MLflow run, with the options as its parameters, and return its id."""
        from mlflow.entities import Param

        name = options.logging.mlflow_experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=options.run_dir.name).info.run_id
        params = [
            Param(mlflow_name(key), str(value)[: self.MAX_VALUE_LENGTH])
            for key, value in leaves(recorded_options(options))
        ]
        self._client.log_batch(run_id, params=params)
        return run_id

    def log(self, step: int, figures: Figures) -> None:
        """Send every finite number; nested names are joined, as in 'domain_loss/news'.

        Raises:
            OSError: if the metrics were not accepted; they are lost.
        """
        from mlflow.entities import Metric

        self._step, now = step, time.time_ns() // 1_000_000
        metrics = [Metric(mlflow_name(n), value, now, step) for n, value in scalars(figures)]
        with self._as_os_error():
            self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        """Mark the run as finished, or as killed if the last step has not been logged.

        Raises:
            OSError: if the server cannot be reached.
        """
        status = "FINISHED" if self._step >= self._train_iters else "KILLED"
        with self._as_os_error():
            self._client.set_terminated(self._id, status)

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OSError(f"MLflow: {first_line(error)}") from error


def kept_id(file: Path, new: Callable[[], str]) -> str:
    """Read the id of a run elsewhere from ``file``; write a ``new`` id if there is none."""
    if not file.exists():
        run_id = new()
        with replacing(file) as temporary:
            temporary.write_text(run_id)
    return file.read_text(encoding="utf-8", errors="replace").strip()


def mlflow_name(name: str) -> str:
    """Replace what MLflow does not accept in the name of a metric or parameter by underscores."""
    parts = (re.sub(r"[^\w .:-]", "_", part) for part in name.split("/"))
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:250]


Logger = JsonLinesLogger | TensorBoardLogger | WandbLogger | MlflowLogger


def open_loggers(options: PretrainOptions, first_step: int) -> list[Logger]:
    """Open the run's loggers on one rank, after ``first_step`` steps.

    A logger whose package is missing is skipped with a warning.
    """
    loggers: list[Logger] = [JsonLinesLogger(options.run_dir / METRICS_NAME)]
    if options.logging.tensorboard and _installed("tensorboard", "pass --no-tensorboard"):
        loggers.append(TensorBoardLogger(options.run_dir / "tensorboard", first_step))
    if options.logging.uses_wandb and _installed(
        "wandb", "leave out --wandb-project and unset WANDB_API_KEY"
    ):
        loggers.append(WandbLogger(options))
    if options.logging.mlflow_experiment is not None and _installed(
        "mlflow", "leave out --mlflow-experiment"
    ):
        loggers.append(MlflowLogger(options))
    return loggers


def _installed(package: str, without: str) -> bool:
    installed = importlib.util.find_spec(package) is not None
    if not installed:
        warnings.warn(
            f"{package} is not installed, so no metrics are logged to it; install {package}, or "
            f"{without}",
            stacklevel=3,
        )
    return installed


def finite(value: Any) -> Any:
    """Replace NaN and infinities in ``value`` by None: JSON cannot represent them."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(figures: Figures) -> Iterator[tuple[str, float]]:
    """Name and value of every finite number; names of nested mappings are joined by '/'."""
    for name, value in leaves(figures):
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of everything in nested mappings; their names are joined by '/'."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
