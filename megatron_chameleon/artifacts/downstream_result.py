"""Accuracy on downstream tasks on disk, with the protocol that gave it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import (
    Amount,
    Count,
    Positive,
    Share,
    read_record,
    write_record,
)
from megatron_chameleon.errors import UserError

KIND = "downstream evaluation"
FORMAT_VERSION = 1
MADE_BY = "tools/evaluate.py downstream writes it"


@dataclasses.dataclass(frozen=True)
class DownstreamProtocol:
    """How tasks are asked. Results of different protocols are not comparable.

    Attributes:
        lm_eval_version: of the package with the tasks' definitions.
        shots: the numbers of solved examples before each question.
        limit: questions of each task, at most, from its beginning; None is all.
        fewshot_seed: of the draw of the examples.
        dtype: what the model computes in.
    """

    lm_eval_version: str
    shots: list[Count]
    limit: Positive | None
    fewshot_seed: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """A share of right answers with its standard error, that of a mean over questions.

    The error is the sample's standard deviation over the square root of the number of questions;
    None where there is but one.
    """

    accuracy: Share
    standard_error: Amount | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Accuracy:
        """Of one value for each question, 0 to 1."""
        number = len(values)
        mean = math.fsum(values) / number
        if number == 1:
            return cls(mean, None)
        variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
        return cls(mean, math.sqrt(variance / number))


@dataclasses.dataclass(frozen=True)
class ShotScore(Accuracy):
    """Accuracy with one number of shots.

    Attributes:
        documents: questions asked.
        truncated_requests: of the requests that were made of them, those that were too long for
            the model, so that the beginning of what stands before the answer was cut off.
        requests_hash: hex SHA-256 of all that was asked, word for word.
    """

    documents: Positive
    truncated_requests: Count
    requests_hash: str


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """What a task gave.

    Attributes:
        metric: lm-eval's name of the metric: acc_norm where the task gives it.
        version: of the task's definition.
        shots_from: the split that shots are drawn from.
        by_shots: number of shots -> accuracy.
        mean: over all numbers of shots; its standard error is over questions, each with the mean of
            its answers, since the same questions are asked every time. None if a number of shots
            is missing.
    """

    metric: str
    version: str
    shots_from: str
    by_shots: dict[Count, ShotScore]
    mean: Accuracy | None


@dataclasses.dataclass(frozen=True)
class Gap:
    """A task, or a number of its shots (None: all of them), that could not be asked, and why."""

    task: str
    shots: int | None
    reason: str

    def __str__(self) -> str:
        at = "" if self.shots is None else f", {self.shots}-shot"
        return f"{self.task}{at}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class DownstreamResult:
    """Downstream accuracy of one checkpoint."""

    checkpoint: str
    checkpoint_hash: str
    step: int
    protocol: DownstreamProtocol
    tasks: dict[str, TaskScore]
    gaps: list[Gap]
    provenance: Provenance
    cost: Cost

    @classmethod
    def load(cls, path: Path) -> DownstreamResult:
        """Read ``path``. Raises UserError naming the file and the field."""
        return read_record(path, cls, kind=KIND, version=FORMAT_VERSION, made_by=MADE_BY)

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        write_record(path, self, kind=KIND, version=FORMAT_VERSION)

    @property
    def complete_tasks(self) -> list[str]:
        """The tasks that have an answer for every number of shots."""
        return [name for name, score in self.tasks.items() if score.mean is not None]

    @property
    def mean(self) -> Accuracy | None:
        """The average of the complete tasks' means, as in the paper's tables; None without any.

        Tasks have different questions, so the squares of their standard errors add up.
        """
        means = [score.mean for score in self.tasks.values() if score.mean is not None]
        if not means:
            return None
        errors = [each.standard_error for each in means]
        squares = math.fsum(math.nan if error is None else error**2 for error in errors)
        error = math.sqrt(squares) / len(means)
        mean = math.fsum(each.accuracy for each in means) / len(means)
        return Accuracy(mean, None if math.isnan(error) else error)


def require_same_questions(results: dict[str, DownstreamResult]) -> None:
    """Refuse to put results side by side that did not answer the same questions.

    Raises:
        UserError: naming two that differ, and in what.
    """
    (first_name, first), *others = results.items()
    for name, result in others:
        difference = _difference(first, result)
        if difference is not None:
            raise UserError(
                f"'{first_name}' and '{name}' were not asked the same: {difference}; evaluate both "
                "by one command"
            )


def _difference(one: DownstreamResult, other: DownstreamResult) -> str | None:
    for field in dataclasses.fields(DownstreamProtocol):
        values = [getattr(result.protocol, field.name) for result in (one, other)]
        if values[0] != values[1]:
            return f"{field.name} is {values[0]} and {values[1]}"
    alone = sorted(set(one.complete_tasks) ^ set(other.complete_tasks))
    if alone:
        return f"one of them alone has {', '.join(alone)}"
    for task in one.complete_tasks:
        scores = [result.tasks[task] for result in (one, other)]
        if scores[0].metric != scores[1].metric:
            return f"{task} gave {scores[0].metric} and {scores[1].metric}"
        asked = [{s: x.requests_hash for s, x in score.by_shots.items()} for score in scores]
        if asked[0] != asked[1]:
            return f"the requests of {task} differ"
    return None
