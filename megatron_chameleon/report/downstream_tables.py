"""The tables of downstream accuracy: the mean over shots, and every number of shots."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_chameleon.artifacts.downstream_result import Accuracy
from megatron_chameleon.report.downstream_comparison import (
    Asked,
    DownstreamComparison,
    average_of,
    compare_downstream,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

METRIC_NAMES = {"acc_norm": "normalised accuracy", "acc": "accuracy"}


def downstream_tables(folder: RunFolder, baseline: str | None = None) -> list[Table]:
    """Accuracy in percent by task, as the mean over shots and by number of shots.

    Args:
        folder: of the run.
        baseline: name of the base run that the others are compared with; None takes the one that
            was trained with uniform weights.

    Returns:
        Two tables; none where nothing was asked.

    Raises:
        UserError: if results did not answer the same questions.
    """
    comparison = compare_downstream(folder, baseline)
    if comparison is None:
        return []
    return [_mean_table(comparison), _shot_table(comparison)]


def accuracy_cells(accuracies: Sequence[Accuracy | None]) -> Row:
    """Cells of one row; the highest is marked if there is something to compare it with."""
    known = [each.accuracy for each in accuracies if each is not None]
    highest = max(known) if len(known) > 1 else None
    return tuple(
        Cell(format_accuracy(each), best=each is not None and each.accuracy == highest)
        for each in accuracies
    )


def format_accuracy(found: Accuracy | None) -> str:
    """A share in percent with its standard error, like '41.2 ± 0.9'; '-' for none."""
    if found is None:
        return MISSING
    error = found.standard_error
    return f"{100 * found.accuracy:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def average_row(comparison: DownstreamComparison) -> Row:
    """Of each run, over the tasks that all have."""
    averages = [run.average(comparison.complete) for run in comparison.runs]
    return (Cell("average"), *accuracy_cells(averages))


def _mean_table(comparison: DownstreamComparison) -> Table:
    rows = tuple(
        (Cell(task), *accuracy_cells([run.mean(task) for run in comparison.runs]))
        for task in comparison.tasks
    )
    return Table(
        title="Downstream accuracy, mean over shots (%)",
        header=("task", *(run.label for run in comparison.runs)),
        rows=rows,
        summary=(average_row(comparison), *_tasks_better(comparison)),
        notes=(
            _how_asked(comparison),
            *_metrics(comparison),
            *average_notes(comparison),
            *_gaps(comparison),
            *_cut(comparison),
        ),
    )


def _shot_table(comparison: DownstreamComparison) -> Table:
    rows = tuple(
        (Cell(f"{task}, {shots}-shot"), *accuracy_cells(_by_shots(comparison, task, shots)))
        for task in comparison.tasks
        for shots in comparison.shots
    )
    averages = []
    for shots in comparison.shots:
        columns = zip(
            *(
                found
                for task in comparison.tasks
                if None not in (found := _by_shots(comparison, task, shots))
            ),
            strict=True,
        )
        means = [average_of(column) for column in columns] or [None] * len(comparison.runs)
        averages.append((Cell(f"average, {shots}-shot"), *accuracy_cells(means)))
    return Table(
        title="Downstream accuracy by number of shots (%)",
        header=("task", *(run.label for run in comparison.runs)),
        rows=rows,
        summary=tuple(averages),
        notes=(
            "± is the standard error over questions. Each average is over the tasks that all runs "
            "have with that number of shots.",
        ),
    )


def _by_shots(comparison: DownstreamComparison, task: str, shots: int) -> list[Accuracy | None]:
    """Of each run."""
    scores = [run.score(task) for run in comparison.runs]
    return [None if score is None else score.by_shots.get(shots) for score in scores]


def _tasks_better(comparison: DownstreamComparison) -> tuple[Row, ...]:
    baseline = comparison.baseline
    if baseline is None or not comparison.others:
        return ()
    counts = (
        Cell(f"{comparison.tasks_better(run, comparison.complete)} of {len(comparison.complete)}")
        for run in comparison.others
    )
    return ((Cell(f"tasks better than {baseline.label}"), Cell(MISSING), *counts),)


def _how_asked(comparison: DownstreamComparison) -> str:
    protocol = comparison.runs[0].result.protocol
    numbers = _listed([str(shots) for shots in protocol.shots])
    limit = "" if protocol.limit is None else f", the first {protocol.limit:,} questions of a task"
    return (
        f"Mean over {numbers} solved examples before each question{limit}, by lm-eval "
        f"{protocol.lm_eval_version}; ± is the standard error over questions. Higher is better; "
        "the highest of each row is marked."
    )


def _metrics(comparison: DownstreamComparison) -> list[str]:
    """Which tasks were scored by which metric."""
    tasks: dict[str, list[str]] = {}
    for task in comparison.tasks:
        score = next((s for run in comparison.runs if (s := run.score(task)) is not None), None)
        if score is not None:
            tasks.setdefault(score.metric, []).append(task)
    parts = [f"{METRIC_NAMES.get(m, m)} ({m}): {', '.join(names)}" for m, names in tasks.items()]
    return [f"Scored by {'; by '.join(parts)}."] if parts else []


def average_notes(comparison: DownstreamComparison) -> list[str]:
    """Over which tasks the average and the count are, where these are not all."""
    left_out = [task for task in comparison.tasks if task not in comparison.complete]
    if not left_out:
        return []
    return [
        f"The average and the count are over the {len(comparison.complete)} of "
        f"{len(comparison.tasks)} tasks that all runs have in full; left out: "
        f"{', '.join(left_out)}."
    ]


def _gaps(comparison: DownstreamComparison) -> list[str]:
    """What was not asked and why, each reason once with the runs that it is of."""
    labels: dict[str, list[str]] = {}
    for run in comparison.runs:
        for gap in _gaps_of(comparison, run):
            labels.setdefault(gap, []).append(run.label)
    everyone = len(comparison.runs)
    return [
        f"Not asked{'' if len(of) == everyone else f' of {_listed(of)}'}: {gap}."
        for gap, of in labels.items()
    ]


def _gaps_of(comparison: DownstreamComparison, run: Asked) -> list[str]:
    """The gaps that its file tells, and those that only the others' files show."""
    told = {gap.task for gap in run.result.gaps}
    found = [str(gap).rstrip(".") for gap in run.result.gaps]
    for task in comparison.tasks:
        score = run.score(task)
        there = () if score is None else score.by_shots
        lacking = [str(shots) for shots in comparison.shots if shots not in there]
        if task in told or not lacking:
            continue
        shots = "" if score is None else f", {_listed(lacking)}-shot"
        found.append(f"{task}{shots}: its evaluation does not have it; run the same command again")
    return found


def _cut(comparison: DownstreamComparison) -> list[str]:
    """Where a model was too short for what it was asked."""
    found = []
    for run in comparison.runs:
        counts = {
            task: sum(each.truncated_requests for each in score.by_shots.values())
            for task, score in run.result.tasks.items()
        }
        tasks = [f"{task} {count:,}" for task, count in counts.items() if count]
        if tasks:
            found.append(
                f"{run.label}: requests that were too long for the model, so that the beginning of "
                f"what stands before the answer was cut off: {', '.join(tasks)}."
            )
    return found


def _listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
