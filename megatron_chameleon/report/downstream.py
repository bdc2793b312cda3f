"""Downstream accuracy: comparison and tables."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pandas as pd

from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamResult,
    require_same_questions,
)
from megatron_chameleon.report.run_folder import (
    DOWNSTREAM_SUFFIX,
    RunFolder,
    first_uniform,
    run_labels,
)
from megatron_chameleon.report.tables import MISSING, Table, formatted, listed, unique_labels

METRIC_NAMES = {"acc_norm": "normalised accuracy", "acc": "accuracy"}


@dataclasses.dataclass(frozen=True)
class DownstreamRun:
    """A downstream result, the name of its base run, and its label in tables."""

    name: str
    label: str
    result: DownstreamResult

    def accuracy(self, task: str, shots: int | None = None) -> Accuracy | None:
        """Accuracy with ``shots`` solved examples, or the mean over all numbers of shots.

        None where it was not evaluated; no mean unless it has all of them.
        """
        score = self.result.tasks.get(task)
        if score is None:
            return None
        return score.mean if shots is None else score.by_shots.get(shots)


@dataclasses.dataclass(frozen=True)
class DownstreamComparison:
    """Results on the same questions, the baseline's first.

    Attributes:
        runs: at least one.
        baseline: one of ``runs``.
        tasks: every task that some run was evaluated on, or reports as missing.
    """

    runs: tuple[DownstreamRun, ...]
    baseline: DownstreamRun | None
    tasks: tuple[str, ...]

    def complete(self, shots: int | None = None) -> list[str]:
        """The tasks that every run has with this, or with every number of shots."""
        return list(self.accuracies(shots).dropna().index)

    def accuracies(self, shots: int | None = None, field: str = "accuracy") -> pd.DataFrame:
        """Accuracy, or its standard error, by task (rows) and label of the run (columns)."""
        found = {
            run.label: [getattr(run.accuracy(task, shots), field, None) for task in self.tasks]
            for run in self.runs
        }
        return pd.DataFrame(found, self.tasks, dtype=float)


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
    require_same_questions(results)
    runs = {name: base_run_of(folder, name) for name in results}
    run_label, count = run_labels(folder.base_runs, runs.values()), Counter(runs.values())
    labels = unique_labels({n: run_label[r] if count[r] == 1 else n for n, r in runs.items()})
    chosen = baseline or first_uniform(folder, runs.values())
    names = sorted(results, key=lambda name: runs[name] != chosen)  # stable: others stay sorted
    found = tuple(DownstreamRun(runs[name], labels[name], results[name]) for name in names)
    planned = [t for r in found for t in (*r.result.tasks, *(gap.task for gap in r.result.gaps))]
    first = found[0] if found[0].name == chosen else None
    return DownstreamComparison(found, first, tuple(dict.fromkeys(planned)))


def base_run_of(folder: RunFolder, name: str) -> str:
    """Name of the base run that a downstream result is of; ``name`` if none is found."""
    for candidate in (name, name.removesuffix(DOWNSTREAM_SUFFIX)):
        if candidate in folder.base_runs:
            return candidate
    checkpoint = folder.downstream[name].checkpoint_hash
    same = [n for n, found in folder.evaluations.items() if found.checkpoint_hash == checkpoint]
    return same[0] if len(same) == 1 else name


def downstream_tables(folder: RunFolder, baseline: str | None = None) -> list[Table]:
    """Accuracy in percent by task: the mean over shots, and by number of shots.

    Args and raises as for :func:`compare_downstream`; no tables where there are no results.
    """
    found = compare_downstream(folder, baseline)
    if found is None:
        return []

    def rows(shots: int | None) -> tuple[pd.DataFrame, list[str]]:
        """Texts by task, and the row of averages over the tasks that all runs have."""
        values, errors = found.accuracies(shots), found.accuracies(shots, "standard_error")
        shared = errors.loc[found.complete(shots)]
        # Tasks have different questions, so that their errors are independent.
        error = (shared**2).sum(skipna=False) ** 0.5 / len(shared) if len(shared) else math.nan
        means = pd.DataFrame({"mean": values.loc[shared.index].mean(), "error": error}).T
        texts = formatted(
            pd.concat([values, means.loc[["mean"]]]),
            percent,
            max,
            pd.concat([errors, means.loc[["error"]].set_axis(["mean"])]),
        )
        suffix = "" if shots is None else f", {shots}-shot"
        last = texts.iloc[-1]
        return texts.iloc[:-1].rename(lambda task: f"{task}{suffix}"), [f"average{suffix}", *last]

    def percent(share: float) -> str:
        return f"{100 * share:.1f}"

    means, average = rows(None)
    summary = [average]
    if found.baseline is not None and len(found.runs) > 1:
        shared = found.accuracies().dropna()
        better = shared.gt(shared[found.baseline.label], axis=0).sum()[1:]
        counts = [f"{count} of {len(shared)}" for count in better]
        summary.append([f"tasks better than {found.baseline.label}", MISSING, *counts])
    note = (
        "± is the standard error over questions. Each average is over the tasks that all runs have "
        "with that number of shots."
    )
    all_shots, averages = zip(*map(rows, _shots(found)), strict=True)
    by_shots = pd.concat(all_shots)
    order = [f"{task}, {n}-shot" for task in found.tasks for n in _shots(found)]
    title = "Downstream accuracy, mean over shots (%)"
    return [
        Table.by_row(title, "task", means, summary, _notes(found)),
        Table.by_row(
            "Downstream accuracy by number of shots (%)",
            "task",
            by_shots.loc[order],
            averages,
            [note],
        ),
    ]


def _shots(found: DownstreamComparison) -> list[int]:
    """The evaluated numbers of solved examples before each question."""
    return found.runs[0].result.protocol.shots


def _notes(found: DownstreamComparison) -> list[str]:
    """Protocol and metrics, and what was not evaluated."""
    protocol, complete = found.runs[0].result.protocol, found.complete()
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
    if len(complete) < len(found.tasks):
        notes.append(
            f"The average and the count are over the {len(complete)} of {len(found.tasks)} tasks "
            "that all runs have in full."
        )
    for run in found.runs:
        # The gaps that its file states, then those that only the other files show.
        gaps = [str(gap).rstrip(".") for gap in run.result.gaps]
        stated = {gap.task for gap in run.result.gaps}
        for task in found.tasks:
            lacking = [str(n) for n in _shots(found) if run.accuracy(task, n) is None]
            if lacking and task not in stated:
                gaps.append(f"{task}, {listed(lacking)}-shot: run its evaluation again")
        if gaps:
            notes.append(f"Not evaluated for {run.label}: {'; '.join(gaps)}.")
        cut = {
            task: sum(each.truncated_requests for each in score.by_shots.values())
            for task, score in run.result.tasks.items()
        }
        if any(cut.values()):
            counts = ", ".join(f"{task} {count:,}" for task, count in cut.items() if count)
            notes.append(f"{run.label}: requests truncated to the model's context: {counts}.")
    return notes
