"""Scores on downstream tasks: final and intermediate results.

An intermediate result is the result of one task with one number of shots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_chameleon.artifacts.evaluation_result import error_of_mean
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import (
    Amount,
    Count,
    FileRecord,
    Positive,
    Share,
    differences,
)
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class DownstreamProtocol:
    """Evaluation settings. Results of different protocols are not comparable.

    Attributes:
        lm_eval_version: version of lm-eval, which defines the tasks.
        shots: numbers of few-shot examples.
        limit: number of questions of each task that are evaluated, from the first on; None means
            all.
        fewshot_seed: random seed for sampling the few-shot examples.
        dtype: compute dtype.
    """

    lm_eval_version: str
    shots: list[Count]
    limit: Positive | None
    fewshot_seed: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Score:
    """Mean scores over the questions of a task, with standard errors.

    A standard error is the sample standard deviation over the questions, divided by the square root
    of their number; None for a single question.

    Attributes:
        accuracy: share of correct answers by the task's metric, see TaskScore.
        standard_error: standard error of ``accuracy``.
        bits_per_byte: bits per UTF-8 byte of the gold answers: for each question, -log2 of the
            probability of the gold answer, divided by the number of bytes of this answer as it is
            scored (with a leading space, if any); then the mean over the questions, as in OLMES
            (``bits_per_byte_corr`` of ``MCAccuracy`` in oe_eval/metrics/metric.py of
            allenai/olmes). Lower is better. None if the task has no gold answers to score.
        bits_per_byte_error: standard error of ``bits_per_byte``.
        acc: lm-eval's acc of a task whose ``accuracy`` is acc_norm: the share of questions whose
            gold answer has the highest log-likelihood, without division by its length. None for
            other tasks.
        acc_error: standard error of ``acc``.
    """

    accuracy: Share
    standard_error: Amount | None
    bits_per_byte: float | None = dataclasses.field(default=None, kw_only=True)
    bits_per_byte_error: Amount | None = dataclasses.field(default=None, kw_only=True)
    acc: Share | None = dataclasses.field(default=None, kw_only=True)
    acc_error: Amount | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        bits_per_byte: Sequence[float] | None,
        acc: Sequence[float] | None = None,
    ) -> Score:
        """Compute the scores.

        Args:
            values: in [0, 1], one per question.
            bits_per_byte: of the gold answers, one per question; None if the task has none.
            acc: in [0, 1], one per question; None if ``values`` are not acc_norm.
        """
        accuracy, error = _mean_and_error(values)
        bits, bits_error = _mean_and_error(bits_per_byte) if bits_per_byte else (None, None)
        plain, plain_error = _mean_and_error(acc) if acc else (None, None)
        return cls(
            accuracy,
            error,
            bits_per_byte=bits,
            bits_per_byte_error=bits_error,
            acc=plain,
            acc_error=plain_error,
        )


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    count, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else None


@dataclasses.dataclass(frozen=True)
class ShotScore(Score):
    """Scores with one number of shots.

    Attributes:
        documents: number of questions.
        truncated_requests: requests longer than the model's sequence length, whose contexts were
            truncated on the left.
        requests_hash: hex SHA-256 of the texts of all requests.
    """

    documents: Positive
    truncated_requests: Count
    requests_hash: str


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """Result of a task.

    Attributes:
        metric: lm-eval's name of the metric: acc_norm where the task defines it.
        version: version of the task's definition.
        shots_from: the split that few-shot examples are sampled from.
        by_shots: number of shots -> scores.
        mean: mean over all numbers of shots; None if one is missing. All numbers of shots have the
            same questions: scores are first averaged per question, and the standard errors are
            computed from these averages.
    """

    metric: str
    version: str
    shots_from: str
    by_shots: dict[Count, ShotScore]
    mean: Score | None

    def unnormalized(self, score: Score | None) -> tuple[float | None, float | None]:
        """Return the accuracy of one of this task's scores without normalization, and its error.

        Both are None if ``score`` is.
        """
        if score is None:
            return None, None
        if self.metric != "acc_norm":
            return score.accuracy, score.standard_error
        return score.acc, score.acc_error


@dataclasses.dataclass(frozen=True)
class Gap:
    """A task that could not be evaluated, and the reason.

    ``shots`` is the number of few-shot examples; None if the reason holds for every number.
    """

    task: str
    shots: int | None
    reason: str

    def __str__(self) -> str:
        at = "" if self.shots is None else f", {self.shots}-shot"
        return f"{self.task}{at}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class DownstreamResult(FileRecord):
    """Downstream scores of one checkpoint."""

    KIND = "downstream evaluation"
    MADE_BY = "megatron-chameleon evaluate downstream writes it"

    checkpoint: str
    checkpoint_hash: str
    step: int
    protocol: DownstreamProtocol
    tasks: dict[str, TaskScore]
    gaps: list[Gap]
    provenance: Provenance
    cost: Cost

    @property
    def complete_tasks(self) -> list[str]:
        """Tasks evaluated with every number of shots."""
        return [name for name, score in self.tasks.items() if score.mean is not None]

    @property
    def mean(self) -> Score | None:
        """Mean of the complete tasks' means, as in the paper's tables; None if no task is complete.

        The bits per byte are averaged over the tasks that have them. ``acc`` is the mean of the
        unnormalized accuracies; None if a complete task lacks it. Tasks have different questions,
        so their standard errors are independent.
        """
        complete = [score for score in self.tasks.values() if score.mean is not None]
        means = [score.mean for score in complete if score.mean is not None]
        if not means:
            return None
        bits = [each.bits_per_byte for each in means if each.bits_per_byte is not None]
        errors = [each.bits_per_byte_error for each in means if each.bits_per_byte is not None]
        plain = [score.unnormalized(score.mean) for score in complete]
        acc = [value for value, _ in plain if value is not None]
        has_acc = len(acc) == len(complete)
        return Score(
            math.fsum(each.accuracy for each in means) / len(means),
            error_of_mean(each.standard_error for each in means),
            bits_per_byte=math.fsum(bits) / len(bits) if bits else None,
            bits_per_byte_error=error_of_mean(errors),
            acc=math.fsum(acc) / len(acc) if has_acc else None,
            acc_error=error_of_mean(error for _, error in plain) if has_acc else None,
        )


def require_same_questions(results: dict[str, DownstreamResult]) -> None:
    """Check that results have the same questions where they share a task and a number of shots.

    Raises:
        UserError: naming two results that differ, and the difference.
    """
    (first_name, first), *others = results.items()
    for name, result in others:
        if difference := _difference(first, result):
            raise UserError(
                f"'{first_name}' and '{name}' answer different questions: {difference}; evaluate "
                "both with the same options"
            )


def _difference(one: DownstreamResult, other: DownstreamResult) -> str | None:
    for name, (first, second) in differences(one.protocol, other.protocol).items():
        return f"{name} is {first} and {second}"
    for task in (name for name in one.tasks if name in other.tasks):
        first, second = one.tasks[task], other.tasks[task]
        if first.metric != second.metric:
            return f"the metrics of {task} are {first.metric} and {second.metric}"
        shots = first.by_shots.keys() & second.by_shots.keys()
        if any(first.by_shots[n].requests_hash != second.by_shots[n].requests_hash for n in shots):
            return f"the requests of {task} differ"
    return None


@dataclasses.dataclass(frozen=True)
class PartSettings:
    """Settings that determine an intermediate result.

    Attributes:
        data: the task's data set: "hub", or "sha256:" and the hash of the files of a local copy.
            In :func:`find_part`, None matches any data set.
    """

    checkpoint_hash: str
    lm_eval_version: str
    task: str
    shots: Count
    limit: Positive | None
    fewshot_seed: int
    dtype: str
    data: str | None


@dataclasses.dataclass(frozen=True)
class DownstreamPart(FileRecord):
    """Intermediate result: one task with one number of shots.

    Attributes:
        settings: settings that determine the result.
        metric: see TaskScore.
        version: see TaskScore.
        shots_from: see TaskScore.
        answers: "1" for each question answered correctly, "0" for the others, in order.
        acc_answers: ``answers`` by acc of a task whose metric is acc_norm, see Score; None for
            other tasks.
        bits_per_byte: of the gold answer of each question, in order, see Score; None if the task
            has no gold answers to score.
        truncated_requests: see ShotScore.
        requests_hash: see ShotScore.
        questions_hash: hex SHA-256 of the questions without few-shot examples.
        cost: cost of the evaluation.
    """

    KIND = "downstream evaluation's part"
    # Version 2 added the identity of the data, version 3 the bits per byte.
    FORMAT_VERSION = 3
    MADE_BY = "delete it, and megatron-chameleon evaluate downstream writes it again"

    settings: PartSettings
    metric: str
    version: str
    shots_from: str
    answers: Annotated[str, Field(pattern="^[01]+$")]
    bits_per_byte: list[float] | None
    truncated_requests: Count
    requests_hash: str
    questions_hash: str
    cost: Cost
    acc_answers: Annotated[str, Field(pattern="^[01]+$")] | None = None

    @property
    def values(self) -> list[float]:
        """1 or 0 for each question."""
        return [float(answer) for answer in self.answers]

    @property
    def acc_values(self) -> list[float] | None:
        """1 or 0 for each question, by acc; None without ``acc_answers``."""
        return None if self.acc_answers is None else [float(each) for each in self.acc_answers]

    @property
    def score(self) -> Score:
        """Mean scores over the questions."""
        return Score.of(self.values, self.bits_per_byte, self.acc_values)


def part_path(work_dir: Path, task: str, shots: int) -> Path:
    """File of the intermediate result of a task with a number of shots."""
    return work_dir / f"{task}-{shots}shot.json"


def find_part(work_dir: Path, settings: PartSettings) -> DownstreamPart | None:
    """Load the intermediate result with these settings; None if it does not exist.

    Raises:
        UserError: if the file has other settings or is damaged.
    """
    path = part_path(work_dir, settings.task, settings.shots)
    if not path.exists():
        return None
    part = DownstreamPart.load(path)
    for name, (found, requested) in differences(part.settings, settings).items():
        if name != "data" or requested is not None:
            raise UserError(
                f"{path} belongs to another evaluation: its {name} is {found}, not {requested}; "
                "choose another --output or --work-dir, or delete the folder"
            )
    return part
