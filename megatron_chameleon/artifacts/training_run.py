"""A training run on disk: run.json says what it is, metrics.jsonl what happened at each step."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat, TypeAdapter

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.mixture import MixturePhase
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import Amount, Count, FolderRecord, InnerPath
from megatron_chameleon.errors import UserError

FILE_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
FORMAT_VERSION = 2  # 2: with mixture_phases
MADE_BY = "tools/pretrain_gpt.py writes it"

Status = Literal["running", "finished", "interrupted", "failed"]


class MetricsWarning(UserWarning):
    """Lines of a metrics file could not be used."""


@dataclasses.dataclass(frozen=True)
class DrawnTokens:
    """Tokens drawn of one domain over the run so far.

    Attributes:
        weight: share of the tokens by the weights in force.
        asked: tokens that the weights asked for, over all their changes.
        got: tokens drawn.
        epochs: passes over the domain's training tokens that these are.
    """

    weight: Amount
    asked: Amount
    got: Count
    epochs: Amount


@dataclasses.dataclass(frozen=True)
class FailedSave:
    """A checkpoint that could not be written: of which step, and why."""

    step: Count
    problem: str


@dataclasses.dataclass(frozen=True)
class TrainingRun(FolderRecord):
    """What ``run.json`` says; ``root`` is the folder it was read from.

    Attributes:
        status: how the run ended, or that it has not.
        step: optimizer steps done, of ``train_iters``.
        tokens: training tokens seen.
        model: the model's dimensions.
        mixture: domain -> weight, as in force at ``step``.
        mixture_phases: the weights that the samples up to ``step`` were drawn by, in order, as they
            were given.
        domain_tokens: tokens and epochs per domain, asked and got.
        checkpoints: folders below ``root``, oldest first.
        cost: over all the times the run was continued.
        skipped_steps: steps that did not update the model, of ``step``.
        stopped_by: what made a run leave before its last step after saving: a signal's name, or
            the option that says so.
        failed_saves: checkpoints that could not be written, over all the times it was continued.
    """

    KIND = "training run"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    status: Status
    step: Count
    train_iters: Count
    tokens: Count
    model: dict[str, Any]
    parameters: Count
    mixture: dict[str, Amount]
    mixture_phases: list[MixturePhase]
    mixture_method: str
    domain_tokens: dict[str, DrawnTokens]
    checkpoints: list[InnerPath]
    provenance: Provenance
    cost: Cost
    skipped_steps: Count = 0
    stopped_by: str | None = None
    failed_saves: list[FailedSave] = dataclasses.field(default_factory=list)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl, in order of steps."""
        yield from read_metrics(self.root / METRICS_NAME)


@dataclasses.dataclass(frozen=True)
class _Metrics:
    """The fields of a line of metrics.jsonl that others read; a line may have more."""

    step: Count
    loss: FiniteFloat | None = None
    domain_loss: dict[str, FiniteFloat | None] | None = None
    validation_loss: dict[str, FiniteFloat | None] | None = None
    hook: dict[str, Any] | None = None  # whatever the hook logs


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, each with a ``step``.

    Damaged lines are skipped, with one :class:`MetricsWarning` at the end; without one for a last
    line that a crash has cut short.

    Raises:
        UserError: if the file cannot be read.
    """
    if not path.is_file():
        return
    damaged: list[int] = []
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    _METRICS.validate_json(line, strict=True)
                    record = json.loads(line)
                except (ValueError, RecursionError):  # ValidationError is a ValueError
                    damaged += [number] if line.endswith(b"\n") else []
                else:
                    yield record
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if damaged:
        warnings.warn(
            f"{path}: {len(damaged)} damaged lines are skipped, the first is line {damaged[0]}",
            MetricsWarning,
            stacklevel=2,
        )


_METRICS = TypeAdapter(_Metrics)


def keep_metrics_until(path: Path, step: int) -> None:
    """Drop the records after ``step``: those steps are run again from the checkpoint.

    Damaged lines stay as they are, but for a last one that a crash has cut short.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> int:
    """The step of a record; -1 of a damaged line."""
    try:
        return _METRICS.validate_json(line, strict=True).step
    except ValueError:  # ValidationError is one
        return -1
