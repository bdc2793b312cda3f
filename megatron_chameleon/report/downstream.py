"""Downstream accuracy: comparison and tables."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamResult,
    TaskScore,
    require_same_questions,
)
from megatron_chameleon.report.run_folder import (
    DOWNSTREAM_SUFFIX,
    RunFolder,
    first_uniform,
    run_labels,
)
from megatron_chameleon.report.tables import MISSING, Table, cells_of, listed, unique_labels

METRIC_NAMES = {"acc_norm": "normalised accuracy", "acc": "accuracy"}


@dataclasses.dataclass(frozen=True)
class DownstreamRun:
    """A downstream result, the name of its base run, and its label in tables."""

    name: str
    label: str
    result: DownstreamResult

    def mean(self, task: str) -> Accuracy | None:
        """Mean accuracy over all numbers of shots; None unless it has all of them."""
        score = self.result.tasks.get(task)
        return None if score is None else score.mean

    def at(self, task: str, shots: int) -> Accuracy | None:
        """Accuracy with ``shots`` solved examples, where it was evaluated."""
        score = self.result.tasks.get(task)
        return None if score is None else score.by_shots.get(shots)

    def average(self, tasks: Iterable[str]) -> Accuracy | None:
        """Average over ``tasks``, which it has; None of no task."""
        return average_of(self.mean(task) for task in tasks)


@dataclasses.dataclass(frozen=True)
class DownstreamComparison:
    """Results on the same questions, the baseline's first.

    Attributes:
        runs: at least one.
        baseline: one of ``runs``.
        tasks: all tasks that any run was to be evaluated on, in order.
        complete: the tasks that every run has with every number of shots.
    """

    runs: tuple[DownstreamRun, ...]
    baseline: DownstreamRun | None
    tasks: tuple[str, ...]
    complete: tuple[str, ...]

    @property
    def shots(self) -> list[int]:
        """The evaluated numbers of solved examples before each question."""
        return self.runs[0].result.protocol.shots

    @property
    def others(self) -> tuple[DownstreamRun, ...]:
        """The runs that are compared with the baseline."""
        return tuple(run for run in self.runs if run is not self.baseline)

    def tasks_better(self, run: DownstreamRun, tasks: Iterable[str]) -> int:
        """In how many of ``tasks``, which all have, ``run`` is more accurate than the baseline."""
        assert self.baseline is not None
        pairs = [(run.mean(task), self.baseline.mean(task)) for task in tasks]
        return sum(a.accuracy > b.accuracy for a, b in pairs if a is not None and b is not None)


def compare_downstream(
    folder: RunFolder, baseline: str | None = None
) -> DownstreamComparison | None:
    """The downstream results of ``folder``; None where there are none.

    Args:
        folder: of the run.
        baseline: name of a base run; None takes the first one trained with uniform weights.

    Raises:
        UserError: if two results did not answer the same questions. Missing tasks or numbers of
            shots are excluded from averages.
    """
    results = folder.downstream
    if not results:
        return None
    require_same_questions(_shared_parts(results))
    runs = {name: base_run_of(folder, name) for name in results}
    run_label, count = run_labels(folder.base_runs, runs.values()), Counter(runs.values())
    labels = unique_labels({n: run_label[r] if count[r] == 1 else n for n, r in runs.items()})
    chosen = baseline or first_uniform(folder, runs.values())
    names = sorted(results, key=lambda name: runs[name] != chosen)  # stable: others stay sorted
    found = tuple(DownstreamRun(runs[name], labels[name], results[name]) for name in names)
    planned = (
        task
        for run in found
        for task in (*run.result.tasks, *(gap.task for gap in run.result.gaps))
    )
    tasks = tuple(dict.fromkeys(planned))
    complete = tuple(task for task in tasks if all(run.mean(task) for run in found))
    return DownstreamComparison(
        found, found[0] if found[0].name == chosen else None, tasks, complete
    )


def base_run_of(folder: RunFolder, name: str) -> str:
    """Name of the base run that a downstream result is of; ``name`` if none is found."""
    for candidate in (name, name.removesuffix(DOWNSTREAM_SUFFIX)):
        if candidate in folder.base_runs:
            return candidate
    checkpoint = folder.downstream[name].checkpoint_hash
    same = [n for n, found in folder.evaluations.items() if found.checkpoint_hash == checkpoint]
    return same[0] if len(same) == 1 else name


def average_of(accuracies: Iterable[Accuracy | None]) -> Accuracy | None:
    """Average of those that are not None, each with the same weight; None of none.

    Tasks have different questions, so their squared standard errors add up.
    """
    known = [each for each in accuracies if each is not None]
    if not known:
        return None
    mean = math.fsum(each.accuracy for each in known) / len(known)
    errors = [each.standard_error for each in known if each.standard_error is not None]
    if len(errors) < len(known):
        return Accuracy(mean, None)
    return Accuracy(mean, math.sqrt(math.fsum(error**2 for error in errors)) / len(known))


def downstream_tables(folder: RunFolder, baseline: str | None = None) -> list[Table]:
    """Accuracy in percent by task: the mean over shots, and by number of shots.

    Args and raises as for :func:`compare_downstream`; no tables where there are no results.
    """
    found = compare_downstream(folder, baseline)
    if found is None:
        return []
    header = ["task", *(run.label for run in found.runs)]
    rows = [[task, *accuracy_cells([run.mean(task) for run in found.runs])] for task in found.tasks]
    averages = [run.average(found.complete) for run in found.runs]
    summary = [["average", *accuracy_cells(averages)]]
    if found.baseline is not None and found.others:
        count = len(found.complete)
        better = [f"{found.tasks_better(r, found.complete)} of {count}" for r in found.others]
        summary.append([f"tasks better than {found.baseline.label}", MISSING, *better])
    means = Table.of(
        "Downstream accuracy, mean over shots (%)", header, rows, summary, _notes(found)
    )
    rows, summary = [], []
    for task in found.tasks:
        for shots in found.shots:
            accuracies = [run.at(task, shots) for run in found.runs]
            rows.append([f"{task}, {shots}-shot", *accuracy_cells(accuracies)])
    for shots in found.shots:
        by_task = [[run.at(task, shots) for run in found.runs] for task in found.tasks]
        full = [accuracies for accuracies in by_task if None not in accuracies]
        mean = [average_of(column) for column in zip(*full, strict=True)]
        summary.append(
            [f"average, {shots}-shot", *accuracy_cells(mean or [None] * len(found.runs))]
        )
    note = (
        "± is the standard error over questions. Each average is over the tasks that all runs have "
        "with that number of shots."
    )
    title = "Downstream accuracy by number of shots (%)"
    return [means, Table.of(title, header, rows, summary, [note])]


def accuracy_cells(accuracies: Sequence[Accuracy | None]) -> list[str]:
    """Percentages like '41.2 ± 0.9', the highest marked."""
    values = [None if each is None else each.accuracy for each in accuracies]
    errors = [None if each is None else each.standard_error for each in accuracies]
    return cells_of(values, lambda share: f"{100 * share:.1f}", max, errors)


def _notes(found: DownstreamComparison) -> list[str]:
    protocol = found.runs[0].result.protocol
    limit = "" if protocol.limit is None else f", the first {protocol.limit:,} questions of a task"
    notes = [
        f"Mean over {listed([str(shots) for shots in protocol.shots])} solved examples before each "
        f"question{limit}, by lm-eval {protocol.lm_eval_version}; ± is the standard error over "
        "questions. Higher is better; the highest of each row is marked."
    ]
    by_metric: dict[str, list[str]] = {}
    for task in found.tasks:
        scores = [run.result.tasks[task] for run in found.runs if task in run.result.tasks]
        if scores:
            by_metric.setdefault(scores[0].metric, []).append(task)
    metrics = [f"{METRIC_NAMES.get(m, m)} ({m}): {', '.join(ts)}" for m, ts in by_metric.items()]
    if metrics:
        notes.append(f"Scored by {'; by '.join(metrics)}.")
    left_out = [task for task in found.tasks if task not in found.complete]
    if left_out:
        notes.append(
            f"The average and the count are over the {len(found.complete)} of {len(found.tasks)} "
            f"tasks that all runs have in full; left out: {', '.join(left_out)}."
        )
    gaps: dict[str, list[str]] = {}
    for run in found.runs:
        for gap in _gaps_of(found, run):
            gaps.setdefault(gap, []).append(run.label)
    for gap, labels in gaps.items():
        of = "" if len(labels) == len(found.runs) else f" for {listed(labels)}"
        notes.append(f"Not evaluated{of}: {gap}.")
    for run in found.runs:
        counts = {
            task: sum(each.truncated_requests for each in score.by_shots.values())
            for task, score in run.result.tasks.items()
        }
        cut = [f"{task} {count:,}" for task, count in counts.items() if count]
        if cut:
            notes.append(
                f"{run.label}: requests longer than the model's context, truncated at the "
                f"beginning: {', '.join(cut)}."
            )
    return notes


def _gaps_of(found: DownstreamComparison, run: DownstreamRun) -> list[str]:
    """The gaps that its file states, and those that only the other files show."""
    stated = {gap.task for gap in run.result.gaps}
    gaps = [str(gap).rstrip(".") for gap in run.result.gaps]
    for task in found.tasks:
        lacking = [str(shots) for shots in found.shots if run.at(task, shots) is None]
        if task in stated or not lacking:
            continue
        shots = f", {listed(lacking)}-shot" if task in run.result.tasks else ""
        gaps.append(f"{task}{shots}: missing from its evaluation; run the same command again")
    return gaps


def _shared_parts(results: dict[str, DownstreamResult]) -> dict[str, DownstreamResult]:
    """Each result restricted to the tasks and numbers of shots that all have."""
    everyone = list(results.values())
    tasks = set.intersection(*(set(result.tasks) for result in everyone))
    shots = {t: set.intersection(*(set(r.tasks[t].by_shots) for r in everyone)) for t in tasks}
    return {
        name: dataclasses.replace(
            result, tasks={t: _only(s, shots[t]) for t, s in result.tasks.items() if shots.get(t)}
        )
        for name, result in results.items()
    }


def _only(score: TaskScore, shots: set[int]) -> TaskScore:
    kept = {number: each for number, each in score.by_shots.items() if number in shots}
    mean = math.fsum(each.accuracy for each in kept.values()) / len(kept)
    return dataclasses.replace(score, by_shots=kept, mean=Accuracy(mean, None))
