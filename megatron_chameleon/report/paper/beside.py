"""A run's tables with the paper's columns beside them, where both are of one setting."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_chameleon.artifacts.downstream_result import Accuracy
from megatron_chameleon.report.comparison import Comparison, Evaluated
from megatron_chameleon.report.downstream_comparison import (
    DownstreamComparison,
    compare_downstream,
)
from megatron_chameleon.report.paper.beside_weights import cost_beside, weights_beside
from megatron_chameleon.report.paper.columns import (
    ACCURACY,
    PAPER,
    PERPLEXITY,
    TITLE,
    Kind,
    count_cells,
    disagreements,
    label_of,
    recomputed_note,
)
from megatron_chameleon.report.paper.results import PaperTable, Setting, source
from megatron_chameleon.report.paper.setting import (
    PaperMatch,
    describe_tokens,
    downstream_differences,
    match_setting,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table

MARKS = "The best of each row is marked, of these runs and of the paper's columns each by itself."


def paper_tables(
    folder: RunFolder, comparison: Comparison | None, baseline: str | None = None
) -> list[Table]:
    """Each of the run's tables with the paper's columns beside its own.

    The setting is that of the corpus's domains, whatever their spelling, of the model's size and,
    roughly, of the training tokens. Where the domains are the paper's and the rest is not, none of
    its figures are shown: one table tells in what the setting differs.

    Args:
        folder: of the run.
        comparison: its evaluated runs; None where no perplexity was evaluated, of which there is
            no table then.
        baseline: name of the base run that the others are compared with, where ``comparison`` has
            none.

    Returns:
        The tables; none for other domains than the paper's.

    Raises:
        UserError: if an artifact is damaged, or downstream results cannot be compared.
    """
    match = match_setting(folder, comparison)
    if match is None:
        return []
    setting = match.setting
    if match.differences:
        tables = [*setting.perplexity[:1], *setting.downstream[:1]]
        return [_differences(setting, match.differences, tables)]
    if comparison is not None and comparison.baseline is not None:
        baseline = comparison.baseline.name
    return [
        *([] if comparison is None else [_perplexity(match, comparison)]),
        *_downstream(setting, compare_downstream(folder, baseline)),
        weights_beside(match, folder, comparison),
        *cost_beside(setting.data_set, folder),
    ]


def _differences(setting: Setting, rows: Sequence[Row], tables: Sequence[PaperTable]) -> Table:
    captions = " and ".join(f"'{table.caption}'" for table in tables)
    return Table(
        title=f"{TITLE}another setting",
        header=("setting", "these runs", "the paper"),
        rows=tuple(rows),
        notes=(
            f"{source()}, has {captions} for {setting.label}. These runs are of another setting, "
            "as the rows tell: the paper's figures are not shown.",
            f"The paper's training tokens are {describe_tokens(setting)}, or half to twice as "
            "many.",
        ),
    )


def _perplexity(match: PaperMatch, comparison: Comparison) -> Table:
    setting, table = match.setting, match.setting.perplexity[0]
    left_out = comparison.left_out
    rows = tuple(
        (
            Cell(name),
            *PERPLEXITY.cells([_perplexity_of(run, name) for run in comparison.runs]),
            *_paper_cells(PERPLEXITY, table, match.names[name]),
        )
        for name in (*comparison.domains, *left_out)
    )
    over = [f"Not in any average or count here: {', '.join(left_out)}."] if left_out else []
    return Table(
        title=f"{TITLE}held-out perplexity ({setting.label})",
        header=("domain", *(run.label for run in comparison.runs), *_headings(table)),
        rows=rows,
        summary=_perplexity_summary(match, comparison),
        notes=(
            *_notes(PERPLEXITY, setting, table),
            *over,
            f"The paper's training tokens are {describe_tokens(setting)}; its sequence length and "
            "tokenizer are not printed either. Compare columns of one side with one another, "
            "rather than with the other side's.",
        ),
    )


def _perplexity_summary(match: PaperMatch, comparison: Comparison) -> tuple[Row, ...]:
    setting, table = match.setting, match.setting.perplexity[0]
    theirs = [match.names[name] for name in comparison.domains]
    average = (
        Cell("average"),
        *PERPLEXITY.cells([run.result.mean_perplexity for run in comparison.runs]),
        *PERPLEXITY.cells([column.average_of(theirs) for column in table.columns.values()]),
    )
    baseline = comparison.baseline
    counts = [
        None if run is baseline or baseline is None else comparison.domains_better(run)
        for run in comparison.runs
    ]
    label = baseline.label if baseline else ""
    return (average, *_better_rows(PERPLEXITY, setting, table, theirs, label, counts))


def _downstream(setting: Setting, comparison: DownstreamComparison | None) -> list[Table]:
    if comparison is None or not setting.downstream:
        return []
    table = setting.downstream[0]
    different = downstream_differences(comparison.runs[0].result.protocol)
    if different:
        return [_differences(setting, different, [table])]
    both = [task for task in comparison.complete if task in table.rows]
    rows = tuple(
        (
            Cell(task),
            *ACCURACY.cells([_percent(run.mean(task)) for run in comparison.runs]),
            *_paper_cells(ACCURACY, table, task),
        )
        for task in comparison.tasks
    )
    return [
        Table(
            title=f"{TITLE}downstream accuracy ({setting.label})",
            header=("task", *(run.label for run in comparison.runs), *_headings(table)),
            rows=rows,
            summary=_downstream_summary(setting, comparison, both) if both else (),
            notes=(
                f"Averages and counts are over the {len(both)} tasks that all runs and the paper "
                "have.",
                *_notes(ACCURACY, setting, table),
                "The paper does not print lm-eval's version; tasks are defined otherwise in "
                "other versions.",
            ),
        )
    ]


def _downstream_summary(
    setting: Setting, comparison: DownstreamComparison, both: Sequence[str]
) -> tuple[Row, ...]:
    table, baseline = setting.downstream[0], comparison.baseline
    average = (
        Cell("average"),
        *ACCURACY.cells([_percent(run.average(both)) for run in comparison.runs]),
        *ACCURACY.cells([column.average_of(both) for column in table.columns.values()]),
    )
    counts = [
        None if run is baseline or baseline is None else comparison.tasks_better(run, both)
        for run in comparison.runs
    ]
    label = baseline.label if baseline else ""
    return (average, *_better_rows(ACCURACY, setting, table, both, label, counts))


def _better_rows(
    kind: Kind,
    setting: Setting,
    table: PaperTable,
    rows: Sequence[str],
    baseline: str,
    counts: Sequence[int | None],
) -> tuple[Row, ...]:
    """How often each column is better than its side's baseline: one row if both have the same.

    Args:
        kind: of the figures.
        setting: with the paper's baseline.
        table: of the paper.
        rows: the paper's names of the rows that count.
        baseline: the label of these runs' own; empty if there is none.
        counts: of each run; None for the baseline.
    """
    paper = label_of(setting.baseline)
    theirs = count_cells(kind, table.columns, setting.baseline, table, rows)
    ours = tuple(Cell(MISSING if count is None else f"{count} of {len(rows)}") for count in counts)
    told = f"{kind.counted} better than"
    if baseline == paper:
        return ((Cell(f"{told} {paper}"), *ours, *theirs),)
    of_paper = (Cell(f"{told} {paper} (the paper's)"), *[Cell("")] * len(ours), *theirs)
    if not baseline:
        return (of_paper,)
    return (Cell(f"{told} {baseline}"), *ours, *[Cell("")] * len(theirs)), of_paper


def _notes(kind: Kind, setting: Setting, table: PaperTable) -> list[str]:
    found = disagreements(kind, table, setting.baseline, table)
    return [f"The paper is {source()}, '{table.caption}'. {MARKS}", recomputed_note(found)]


def _perplexity_of(run: Evaluated, domain: str) -> float | None:
    found = run.result.domains.get(domain)
    return None if found is None else found.perplexity


def _percent(found: Accuracy | None) -> float | None:
    return None if found is None else 100 * found.accuracy


def _paper_cells(kind: Kind, table: PaperTable, row: str) -> Row:
    return kind.cells([column.printed.get(row) for column in table.columns.values()])


def _headings(table: PaperTable) -> list[str]:
    return [f"{PAPER}{label_of(method)}" for method in table.columns]
