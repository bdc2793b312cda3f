"""A training run: its record run.json and its log metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat, TypeAdapter

from megatron_chameleon.artifacts.corpus import TokenizerIdentity
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.mixture import MixturePhase
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import (
    Amount,
    Count,
    FolderRecord,
    InnerPath,
    Positive,
)
from megatron_chameleon.artifacts.target import TargetShares
from megatron_chameleon.errors import UserError

METRICS_NAME = "metrics.jsonl"

Status = Literal["running", "finished", "interrupted", "failed"]


class MetricsWarning(UserWarning):
    """Lines of a metrics file are damaged."""


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Token and epoch counts of one domain up to the current step: target vs. actual.

    Attributes:
        weight: current weight.
        target: target number of tokens, summed over all mixture phases.
        actual: actual number of tokens.
        epochs: passes over the domain's training tokens, after the cut by ``--target-tokens``.
    """

    weight: Amount
    target: Amount
    actual: Count
    epochs: Amount


@dataclasses.dataclass(frozen=True)
class FailedSave:
    """A checkpoint that could not be written, and the reason."""

    step: Count
    problem: str


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How the global batch is sharded over ranks after ``first_step`` steps are done."""

    first_step: Count
    data_parallel_size: Positive
    micro_batch_size: Positive


@dataclasses.dataclass(frozen=True)
class TrainingRun(FolderRecord):
    """Content of ``run.json``; ``root`` is its folder.

    Attributes:
        status: status of the run.
        step: optimizer steps done, of ``train_iters``.
        tokens: training tokens seen.
        model: the model's dimensions.
        mixture: domain -> weight at ``step``.
        mixture_phases: unnormalized sampling weights of the phases up to ``step``, in order.
        domain_tokens: domain -> target and actual tokens, and epochs.
        checkpoints: folders in ``root``, oldest first.
        cost: total over all resumptions.
        skipped_steps: number of steps, out of ``step``, that did not update the model.
        stopped_by: signal or option that stopped the run before its last step, after a save.
        failed_saves: checkpoints that could not be written, over all resumptions.
        batch_layouts: how batches were sharded, in order of steps; a resumed run may change it.
        order_version: version of the sample order.
        tokenizer: the tokenizer of the tokens.
        target: the target whose loss validations measure, if any.
        best_step: step of the validation with the lowest target loss.
        best_target_loss: the target loss of that step, in nats per token.
        limited: domain -> epochs that the mixture planned, for the domains whose weights
            ``--max-repetition-action redistribute`` has lowered.
    """

    KIND = "training run"
    FILE_NAME = "run.json"
    FORMAT_VERSION = 2  # version 2 added mixture_phases
    MADE_BY = "megatron-chameleon pretrain_gpt writes it"

    status: Status
    step: Count
    train_iters: Count
    tokens: Count
    model: dict[str, Any]
    parameters: Count
    mixture: dict[str, Amount]
    mixture_phases: list[MixturePhase]
    mixture_method: str
    domain_tokens: dict[str, SampledTokens]
    checkpoints: list[InnerPath]
    provenance: Provenance
    cost: Cost
    skipped_steps: Count = 0
    stopped_by: str | None = None
    failed_saves: list[FailedSave] = dataclasses.field(default_factory=list)
    batch_layouts: list[BatchLayout] = dataclasses.field(kw_only=True)
    order_version: Count = dataclasses.field(kw_only=True)
    tokenizer: TokenizerIdentity = dataclasses.field(kw_only=True)
    target: TargetShares | None = None
    best_step: Count | None = None
    best_target_loss: FiniteFloat | None = None
    limited: dict[str, Amount] | None = None

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl, ordered by step."""
        yield from read_metrics(self.root / METRICS_NAME)


@dataclasses.dataclass(frozen=True)
class _SkippedStep:
    step: Count


@dataclasses.dataclass(frozen=True)
class _Metrics:
    """The fields of a metrics line that other tools read; a line may have further fields."""

    step: Count
    loss: FiniteFloat | None = None
    domain_loss: dict[str, FiniteFloat | None] | None = None
    validation_loss: dict[str, FiniteFloat | None] | None = None
    target_loss: FiniteFloat | None = None
    hook: dict[str, Any] | None = None  # may have any fields
    skipped: list[_SkippedStep] | None = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, each with a ``step``.

    Damaged lines are skipped, with one :class:`MetricsWarning` at the end. A last line truncated by
    a crash is skipped silently.

    Raises:
        UserError: if the file cannot be read.
    """
    if not path.is_file():
        return
    damaged: list[int] = []
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if record := _parsed(line):
                    yield record
                elif line.endswith(b"\n"):
                    damaged.append(number)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if damaged:
        warnings.warn(
            f"{path}: {len(damaged)} damaged lines are skipped, the first is line {damaged[0]}",
            MetricsWarning,
            stacklevel=2,
        )


def keep_metrics_until(path: Path, step: int) -> None:
    """Drop the records after ``step``, where the run resumes, and a truncated last line.

    Other damaged lines are kept.
    """

    def is_kept(line: bytes) -> bool:
        record = _parsed(line)
        return line.endswith(b"\n") and (record is None or record["step"] <= step)

    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(line for line in lines if is_kept(line)))


_METRICS = TypeAdapter(_Metrics)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line of metrics; None for a damaged line."""
    try:
        _METRICS.validate_json(line, strict=True)
        record: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):  # ValidationError is a ValueError
        return None
    return record
