"""Downstream scores: comparison and tables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from megatron_chameleon.artifacts.downstream_result import (
    DownstreamProtocol,
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
from megatron_chameleon.report.tables import (
    Table,
    counts_better,
    formatted,
    four_decimals,
    listed,
    unique_labels,
)

Form = Callable[[float], str]
Best = Callable[[list[float]], float]
METRIC_NAMES = {"acc_norm": "normalised accuracy", "acc": "accuracy"}


@dataclasses.dataclass(frozen=True)
class DownstreamComparison:
    """Downstream results on the same questions; a baseline's result comes first.

    Attributes:
        results: label of a run -> its result; at least one.
        baseline: label of the baseline.
    """

    results: Mapping[str, DownstreamResult]
    baseline: str | None = None

    @functools.cached_property
    def tasks(self) -> list[str]:
        """Every task that at least one run was evaluated on or reports as missing."""
        planned = [(*r.tasks, *(gap.task for gap in r.gaps)) for r in self.results.values()]
        return list(dict.fromkeys(itertools.chain.from_iterable(planned)))

    @property
    def protocol(self) -> DownstreamProtocol:
        """The evaluation protocol, which all results share."""
        return next(iter(self.results.values())).protocol

    def accuracies(self, shots: int | None = None, field: str = "accuracy") -> pd.DataFrame:
        """Tabulate :func:`scores` by task (rows) and label of the run (columns)."""
        return scores(self.results, self.tasks, shots, field)

    @property
    def has_acc(self) -> bool:
        """Whether a task that is scored by acc_norm also has the accuracy without it."""
        scores = [score for result in self.results.values() for score in result.tasks.values()]
        return any(score.mean is not None and score.mean.acc is not None for score in scores)


def scores(
    results: Mapping[Any, DownstreamResult],
    tasks: Sequence[str],
    shots: int | None = None,
    field: str = "accuracy",
) -> pd.DataFrame:
    """Tabulate accuracies, or another field, by task (rows) and key of the result (columns).

    Args:
        results: key -> result.
        tasks: names of the rows.
        shots: number of solved examples; None takes the mean over all numbers of shots. Values that
            were not evaluated are NaN; a mean is NaN if any number of shots is missing.
        field: field of Score, such as "standard_error" or "bits_per_byte". "acc" and "acc_error"
            are the unnormalized accuracies of all tasks and their errors.
    """

    def value(score: TaskScore) -> float | None:
        accuracy = score.mean if shots is None else score.by_shots.get(shots)
        if field in ("acc", "acc_error"):
            return score.unnormalized(accuracy)[field == "acc_error"]
        found: float | None = getattr(accuracy, field, None)
        return found

    columns = {
        key: pd.Series({task: value(score) for task, score in result.tasks.items()}, tasks, float)
        for key, result in results.items()
    }
    return pd.DataFrame(columns, tasks, dtype=float)


def compare_downstream(
    folder: RunFolder, baseline: str | None = None
) -> DownstreamComparison | None:
    """Load the downstream results of ``folder``; None if it has none.

    Args:
        folder: run folder.
        baseline: name of a base run; None takes the first run trained with uniform weights.

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
    names = sorted(results, key=lambda name: runs[name] != chosen)  # put the baseline first
    found = {labels[name]: results[name] for name in names}
    return DownstreamComparison(found, labels[names[0]] if runs[names[0]] == chosen else None)


def base_run_of(folder: RunFolder, name: str) -> str:
    """Return the base run that the downstream result ``name`` evaluates; ``name`` if none."""
    for candidate in (name, name.removesuffix(DOWNSTREAM_SUFFIX)):
        if candidate in folder.base_runs:
            return candidate
    checkpoint = folder.downstream[name].checkpoint_hash
    same = [n for n, found in folder.evaluations.items() if found.checkpoint_hash == checkpoint]
    return same[0] if len(same) == 1 else name


def downstream_tables(found: DownstreamComparison | None) -> list[Table]:
    """Tables of scores by task: mean accuracy over shots, bits per byte, accuracy by shots.

    A second table of mean accuracies has the unnormalized accuracies (acc). It is left out if no
    result has both, and the table of bits per byte if no result has them. The list is empty if
    there are no results.
    """
    if found is None:
        return []

    def table(title: str, field: str, error: str, form: Form, best: Best, *notes: str) -> Table:
        """Compare means over shots by task; the averages are over the tasks that all runs have."""
        values, errors = found.accuracies(None, field), found.accuracies(None, error)
        texts, average = _rows(values, errors, form, best)
        summary = [average]
        if (label := found.baseline) is not None and len(found.results) > 1:
            counts = counts_better(values.dropna(), label, best)
            summary.append([f"tasks better than {label}", *counts])
        return Table.by_row(title, "task", texts, summary, notes)

    def rows(shots: int) -> tuple[pd.DataFrame, list[str]]:
        values, errors = found.accuracies(shots), found.accuracies(shots, "standard_error")
        return _rows(values, errors, _percent, max, f", {shots}-shot")

    tables = [
        table(
            "Downstream accuracy, mean over shots (%)",
            "accuracy",
            "standard_error",
            _percent,
            max,
            *_notes(found),
        )
    ]
    if found.has_acc:
        tables.append(
            table(
                "Downstream accuracy without length normalization, mean over shots (%)",
                "acc",
                "acc_error",
                _percent,
                max,
                "lm-eval's acc: the answer with the highest log-likelihood counts, whatever its "
                "length. Tasks without acc_norm have the same accuracy in both tables.",
            )
        )
    if found.accuracies(None, "bits_per_byte").notna().any(axis=None):
        tables.append(
            table(
                "Bits per byte of gold answers, mean over shots",
                "bits_per_byte",
                "bits_per_byte_error",
                four_decimals,
                min,
                "-log2 of the probability of a question's gold answer, divided by the UTF-8 bytes "
                "of this answer: mean over questions and numbers of examples; ± is its standard "
                f"error. Lower is better{_marked(found, 'lowest')}.",
            )
        )
    note = (
        "± is the standard error over questions. Each average is over the tasks that all runs have "
        "with that number of shots."
    )
    all_shots, averages = zip(*map(rows, found.protocol.shots), strict=True)
    order = [f"{task}, {n}-shot" for task in found.tasks for n in found.protocol.shots]
    by_shots, title = pd.concat(all_shots).loc[order], "Downstream accuracy by number of shots (%)"
    return [*tables, Table.by_row(title, "task", by_shots, averages, [note])]


def _rows(
    values: pd.DataFrame, errors: pd.DataFrame, form: Form, best: Best, suffix: str = ""
) -> tuple[pd.DataFrame, list[str]]:
    """Format values by task, and their averages over the tasks that all runs have."""
    shared = errors.loc[values.dropna().index]
    # Tasks have different questions, so their errors are independent.
    error = (shared**2).sum(skipna=False) ** 0.5 / len(shared) if len(shared) else math.nan
    means = pd.DataFrame({"mean": values.loc[shared.index].mean(), "error": error}).T
    texts = formatted(
        pd.concat([values, means.loc[["mean"]]]),
        form,
        best,
        pd.concat([errors, means.loc[["error"]].set_axis(["mean"])]),
    )
    last = texts.iloc[-1]
    return texts.iloc[:-1].rename(lambda task: f"{task}{suffix}"), [f"average{suffix}", *last]


def _marked(found: DownstreamComparison, best: str) -> str:
    return f"; the {best} of each row is marked" if len(found.results) > 1 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _notes(found: DownstreamComparison) -> list[str]:
    """Notes on the protocol, the metrics, and the tasks that were not evaluated."""
    protocol, complete = found.protocol, found.accuracies().dropna()
    limit = protocol.limit
    asked = "the tasks" if limit is None else f"the first {limit:,} questions of each task"
    shots = listed([str(number) for number in protocol.shots])
    notes = [
        f"lm-eval {protocol.lm_eval_version} evaluated {asked} with {shots} solved examples before "
        "each question. An accuracy is the mean over these numbers of examples; ± is its standard "
        f"error over questions. Higher is better{_marked(found, 'highest')}."
    ]
    by_metric: dict[str, list[str]] = {}
    for task in found.tasks:
        metric = next(
            (r.tasks[task].metric for r in found.results.values() if task in r.tasks), None
        )
        if metric is not None:
            by_metric.setdefault(metric, []).append(task)
    metrics = [f"{METRIC_NAMES.get(m, m)} ({m}): {', '.join(ts)}" for m, ts in by_metric.items()]
    if metrics:
        notes.append(f"Scored by {'; by '.join(metrics)}.")
    if len(complete) < len(found.tasks):
        notes.append(
            f"The average and the count are over the {len(complete)} of {len(found.tasks)} tasks "
            "that all runs have with every number of shots."
        )
    for label, result in found.results.items():
        # Gaps that this result's file records, then tasks that only other results have.
        gaps = [str(gap).rstrip(".") for gap in result.gaps]
        stated = {gap.task for gap in result.gaps}
        for task in found.tasks:
            evaluated = result.tasks[task].by_shots if task in result.tasks else ()
            lacking = [str(n) for n in protocol.shots if n not in evaluated]
            if lacking and task not in stated:
                gaps.append(f"{task}, {listed(lacking)}-shot: run its evaluation again")
        if gaps:
            notes.append(f"Not evaluated for {label}: {'; '.join(gaps)}.")
        cut = {
            task: sum(each.truncated_requests for each in score.by_shots.values())
            for task, score in result.tasks.items()
        }
        if any(cut.values()):
            counts = ", ".join(f"{task} {count:,}" for task, count in cut.items() if count)
            notes.append(f"{label}: requests truncated to the model's context: {counts}.")
    return notes
