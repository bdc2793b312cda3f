"""Which downstream results are compared, under which labels, and which tasks all of them have."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamResult,
    TaskScore,
    require_same_questions,
)
from megatron_chameleon.report.comparison import BASELINE_METHOD, run_labels
from megatron_chameleon.report.names import unique_labels
from megatron_chameleon.report.run_folder import RunFolder

# What examples/evaluate_downstream.sh puts after the name of the base run.
SUFFIX = "-downstream"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A downstream result with the name of its base run, and what tables call it."""

    name: str
    label: str
    result: DownstreamResult

    def score(self, task: str) -> TaskScore | None:
        """What ``task`` gave, if it was asked at all."""
        return self.result.tasks.get(task)

    def mean(self, task: str) -> Accuracy | None:
        """Of ``task``, over all numbers of shots; None unless it has all of them."""
        score = self.score(task)
        return None if score is None else score.mean

    def average(self, tasks: Iterable[str]) -> Accuracy | None:
        """The average of the means of ``tasks``, which it has; None of no task.

        Tasks have different questions, so the squares of their standard errors add up.
        """
        return average_of(self.mean(task) for task in tasks)


@dataclasses.dataclass(frozen=True)
class DownstreamComparison:
    """Results of the same questions, the baseline's first.

    Attributes:
        runs: at least one.
        baseline: of ``runs``.
        tasks: those that any of the runs was to be asked, in order.
        complete: those of them that every run has with every number of shots.
    """

    runs: tuple[Asked, ...]
    baseline: Asked | None
    tasks: tuple[str, ...]
    complete: tuple[str, ...]

    @property
    def shots(self) -> list[int]:
        """The numbers of solved examples before each question."""
        return self.runs[0].result.protocol.shots

    @property
    def others(self) -> tuple[Asked, ...]:
        """The runs that are compared with the baseline."""
        return tuple(run for run in self.runs if run is not self.baseline)

    def tasks_better(self, run: Asked, tasks: Iterable[str]) -> int:
        """In how many of ``tasks``, which all have, ``run`` is more often right than the baseline.

        There is a baseline.
        """
        assert self.baseline is not None
        pairs = [(run.mean(task), self.baseline.mean(task)) for task in tasks]
        return sum(a.accuracy > b.accuracy for a, b in pairs if a is not None and b is not None)


def compare_downstream(
    folder: RunFolder, baseline: str | None = None
) -> DownstreamComparison | None:
    """The downstream results of ``folder``; None where there is none.

    Args:
        folder: of the run.
        baseline: name of the base run that the others are compared with, where it has a result;
            None takes the first that was trained with uniform weights, if there is one.

    Raises:
        UserError: if two results did not answer the same questions. That one lacks a task, or a
            number of its shots, is no reason: averages leave it out.
    """
    results = folder.downstream
    if not results:
        return None
    require_same_questions(_shared_parts(results))
    runs = {name: base_run_of(folder, name) for name in results}
    labels = _labels(folder, runs)
    chosen = baseline or _first_uniform(folder, runs)
    names = sorted(results, key=lambda name: runs[name] != chosen)  # stable: others stay sorted
    asked = tuple(Asked(runs[name], labels[name], results[name]) for name in names)
    tasks = tuple(dict.fromkeys(task for run in asked for task in _to_be_asked(run.result)))
    return DownstreamComparison(
        runs=asked,
        baseline=asked[0] if asked[0].name == chosen else None,
        tasks=tasks,
        complete=tuple(task for task in tasks if all(run.mean(task) for run in asked)),
    )


def base_run_of(folder: RunFolder, name: str) -> str:
    """The base run that the downstream result ``name`` is of; ``name`` itself if none is found."""
    for candidate in (name, name.removesuffix(SUFFIX)):
        if candidate in folder.base_runs:
            return candidate
    checkpoint = folder.downstream[name].checkpoint_hash
    same = [n for n, found in folder.evaluations.items() if found.checkpoint_hash == checkpoint]
    return same[0] if len(same) == 1 else name


def average_of(accuracies: Iterable[Accuracy | None]) -> Accuracy | None:
    """The average, each counting the same, of those that are there; None of none."""
    there = [each for each in accuracies if each is not None]
    if not there:
        return None
    mean = math.fsum(each.accuracy for each in there) / len(there)
    errors = [each.standard_error for each in there if each.standard_error is not None]
    if len(errors) < len(there):
        return Accuracy(mean, None)
    return Accuracy(mean, math.sqrt(math.fsum(error**2 for error in errors)) / len(there))


def _to_be_asked(result: DownstreamResult) -> list[str]:
    return [*result.tasks, *(gap.task for gap in result.gaps)]


def _labels(folder: RunFolder, runs: Mapping[str, str]) -> dict[str, str]:
    """Name of a result -> its run's label; of several of one run, its own name."""
    labels = run_labels(folder.base_runs, runs.values())
    count = Counter(runs.values())
    return unique_labels(
        {name: labels[run] if count[run] == 1 else name for name, run in runs.items()}
    )


def _first_uniform(folder: RunFolder, runs: Mapping[str, str]) -> str | None:
    uniform = (
        run
        for run in runs.values()
        if run in folder.base_runs and folder.base_runs[run].mixture_method == BASELINE_METHOD
    )
    return next(uniform, None)


def _shared_parts(results: Mapping[str, DownstreamResult]) -> dict[str, DownstreamResult]:
    """Of each result the tasks and numbers of shots that all have, as if these were all."""
    everyone = list(results.values())
    tasks = set.intersection(*(set(result.tasks) for result in everyone))
    shots = {
        task: set.intersection(*(set(result.tasks[task].by_shots) for result in everyone))
        for task in tasks
    }
    return {
        name: dataclasses.replace(
            result,
            tasks={t: _only(s, shots[t]) for t, s in result.tasks.items() if shots.get(t)},
        )
        for name, result in results.items()
    }


def _only(score: TaskScore, shots: set[int]) -> TaskScore:
    """``score`` of these numbers of shots alone, at least one."""
    kept = {number: each for number, each in score.by_shots.items() if number in shots}
    mean = math.fsum(each.accuracy for each in kept.values()) / len(kept)
    return dataclasses.replace(score, by_shots=kept, mean=Accuracy(mean, None))
