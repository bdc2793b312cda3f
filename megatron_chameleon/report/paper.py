"""Tables of a run's results next to those that Chameleon's paper prints for the same setting.

paper_results.json has the figures as printed; averages and counts are recomputed from its rows. The
paper's weights and the FLOPs to obtain them are in ``interchange.published``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import pandas as pd

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.interchange.published import PublishedColumn, published_column
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.downstream import base_run_of, compare_downstream
from megatron_chameleon.report.results import ComparedRuns
from megatron_chameleon.report.run_folder import RunFolder, run_labels, same_weights
from megatron_chameleon.report.tables import (
    METHOD_LABELS,
    MISSING,
    Table,
    cells_of,
    counts_better,
    format_flops,
    format_perplexity,
    formatted,
    four_decimals,
)

# Prefix of the titles of tables that compare runs with the paper, and prefix of the headings of
# the paper's columns.
TITLE, PAPER = "Next to the paper: ", "paper: "
# The paper prints the steps of fine-tuning. The steps of its base models and the sequence length
# are assumed, as in examples/hyperparameters.sh.
FINE_TUNING_STEPS, ASSUMED_STEPS, ASSUMED_SEQ_LENGTH = 10_000, 20_000, 1024
# A run matches a setting if it has half to twice as many training tokens as the setting.
TOKEN_FACTOR = 2.0
SHOTS = [0, 1, 2, 3, 4, 5]
# The paper prints "Lambada". Results of earlier releases have lm-eval's other variant of the task.
LAMBADA, OTHER_LAMBADA = "lambada_standard", "lambada_openai"
METRIC_NOTE = (
    "The paper states acc_norm where a task defines it, but its figures look like acc: they are 13 "
    "to 17% on OpenBookQA, where guessing gives 25%, as is usual for acc of small models."
)
PREFIXES = ("redpajama", "slimpajama", "thepile", "pile", "wiki40b", "thestack", "stack")
# Method of a mixture -> its name in the paper, if the two differ.
PAPER_METHODS = {"chameleon-pretrain": "chameleon"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model on one data set of the paper.

    Runs are compared with its first perplexity table and its first downstream table.

    Attributes:
        data_set: name, as in ``interchange.published``.
        data: label of the data set, alternative ``spellings`` of its domains, the methods whose
            final ``weights`` are printed, ``other_flops`` of other methods, ``gpu_hours`` of each
            method, and ``base_gpu_hours`` of each model size.
        size: name of the model's size.
        model: dimensions of the model, with the keys of a run's record.
        batch_size: sequences per step.
        baseline: the method with which the paper's other methods are compared, row by row.
        perplexity: tables of held-out perplexity per domain, each with a caption and a column per
            method.
        downstream: tables of accuracy per task in percent, the mean over 0 to 5 shots, in the same
            form.
        fine_tuned: whether the model started from weights trained on the Pile.
    """

    data_set: str
    data: Mapping[str, Any]
    size: str
    model: Mapping[str, int]
    batch_size: int
    baseline: str
    perplexity: Sequence[Mapping[str, Any]]
    downstream: Sequence[Mapping[str, Any]]
    fine_tuned: bool = False

    @property
    def label(self) -> str:
        """Label of the setting: the data set and the model size."""
        return f"{self.data['label']}, {self.size}"

    @property
    def tokens(self) -> int:
        """Assumed training tokens."""
        steps = FINE_TUNING_STEPS if self.fine_tuned else ASSUMED_STEPS
        return steps * self.batch_size * ASSUMED_SEQ_LENGTH

    def matches(self, run: TrainingRun | None) -> bool:
        """Whether ``run`` has this model, about as many tokens, and the same ``fine_tuned``."""
        if run is None:
            return False
        gpt2 = {"position_embedding_type": "learned_absolute"}
        model, expected = gpt2 | run.model, gpt2 | dict(self.model)
        if any(model.get(name) != value for name, value in expected.items()):
            return False
        is_near = self.tokens / TOKEN_FACTOR <= run.tokens <= self.tokens * TOKEN_FACTOR
        return is_near and self.fine_tuned == ("pretrained checkpoint" in run.provenance.inputs)

    @property
    def columns(self) -> dict[str, PublishedColumn]:
        """Method -> printed weights, with the FLOPs to obtain them."""
        return {m: published_column(f"{self.data_set}/{m}") for m in self.data["weights"]}


@functools.cache
def paper_settings() -> Mapping[str, Setting]:
    """Name -> setting, in the order of the file."""
    content = _content()
    return {
        name: Setting(
            **found,
            data=content["data_sets"][found["data_set"]],
            model=content["models"][found["size"]],
        )
        for name, found in content["settings"].items()
    }


@functools.cache
def _content() -> Mapping[str, Any]:
    file = resources.files("megatron_chameleon.report").joinpath("paper_results.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def printed_figures(table: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of a printed table by domain or task (rows) and method (columns)."""
    return pd.DataFrame({method: c["printed"] for method, c in table["columns"].items()})


def paper_names(setting: Setting, domains: Iterable[str]) -> dict[str, str] | None:
    """Domain -> its name in the paper; None unless each of the paper's domains occurs once."""

    def plain(name: str) -> str:
        return "".join(sign for sign in name.casefold() if sign.isalnum() or sign == "+")

    column = next(iter(setting.columns.values()))
    known = {plain(name): name for name in column.printed}
    known |= {plain(own): name for own, name in column.own_names.items()}
    known |= setting.data.get("spellings", {})
    names = {}
    for domain in domains:
        name = plain(domain)
        # A data set's name at the start of a domain's name is ignored.
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        names[domain] = known.get(name) or known.get(name.removeprefix(prefix)) or ""
    return names if sorted(names.values()) == sorted(column.printed) else None


def paper_tables(
    folder: RunFolder, comparison: ComparedRuns | None, baseline: str | None = None
) -> list[Table]:
    """Build tables of the run's results with the paper's columns next to them.

    A setting matches if it has the corpus's domains (in any spelling), the model's size and, within
    a factor of two, the training tokens. If the perplexity of no run was evaluated, the tables show
    the runs with downstream results, or else all base runs.

    Args:
        folder: run folder.
        comparison: its evaluated runs; None where no perplexity was evaluated.
        baseline: name of the baseline run, used if ``comparison`` has none.

    Returns:
        The tables; an empty list if no setting of the paper matches.

    Raises:
        UserError: if an artifact is damaged, or downstream results cannot be compared.
    """
    domains = [*comparison.domains, *comparison.left_out] if comparison else []
    if folder.corpus is not None:
        domains = folder.corpus.names
    runs: list[TrainingRun | None]
    if comparison is not None:
        runs = [run.run for run in comparison.runs]
    else:
        runs = [folder.base_runs.get(base_run_of(folder, name)) for name in folder.downstream]
        runs = runs or list(folder.base_runs.values())
    settings = paper_settings().values()
    fitting = (setting for setting in settings if all(map(setting.matches, runs)))
    found = ((setting, paper_names(setting, domains)) for setting in fitting)
    setting, names = next(((s, names) for s, names in found if names is not None), (None, {}))
    if setting is None:
        return []
    tables = [] if comparison is None else [_perplexity_table(setting, names, comparison)]
    if setting.downstream:
        if comparison is not None and comparison.baseline is not None:
            baseline = comparison.baseline.name
        tables += _downstream_table(setting, folder, baseline)
    tables.append(_weights_table(setting, names, folder, comparison))
    return tables + _cost_table(setting, folder)


def _perplexity_table(
    setting: Setting, names: Mapping[str, str], comparison: ComparedRuns
) -> Table:
    left_out, baseline = comparison.left_out, comparison.baseline
    notes = [f"Excluded from averages and counts: {', '.join(left_out)}."] if left_out else []
    notes.append(
        "The paper does not print its training tokens, sequence length and tokenizer, so compare "
        "the paper's columns only with each other."
    )
    printed = printed_figures(setting.perplexity[0])
    rows = [*comparison.domains, *left_out]
    sides = (
        comparison.perplexity.reindex(rows),
        printed.loc[[names[name] for name in rows]].set_axis(rows),
    )
    label = baseline.label if baseline else None
    return _both_sides("domain", setting, sides, comparison.domains, label, notes)


def _downstream_table(setting: Setting, folder: RunFolder, baseline: str | None) -> list[Table]:
    found = compare_downstream(folder, baseline)
    if found is None:
        return []
    if sorted(found.protocol.shots) != SHOTS or found.protocol.limit is not None:
        return []  # the paper averages other shots or questions
    printed = printed_figures(setting.downstream[0])
    if LAMBADA not in found.tasks:
        printed = printed.rename(index={LAMBADA: OTHER_LAMBADA})
    tables = []
    for metric, field in (("acc_norm", "accuracy"), ("acc", "acc")):
        figures = found.accuracies(None, field)
        both = [task for task in figures.dropna().index if task in printed.index]
        notes = [
            f"Averages and counts are over the {len(both)} tasks that all runs and the paper have.",
            METRIC_NOTE,
        ]
        if metric == "acc_norm" and not found.has_acc:
            notes.append("These results have no acc: run their evaluation again to compare by acc.")
        sides = (100 * figures, printed.reindex(found.tasks))
        tables.append(_both_sides("task", setting, sides, both, found.baseline, notes, metric))
    return tables if found.has_acc else tables[:1]


def _both_sides(
    noun: str,
    setting: Setting,
    sides: tuple[pd.DataFrame, pd.DataFrame],
    both: Sequence[str],
    baseline: str | None,
    notes: Iterable[str],
    metric: str = "",
) -> Table:
    """Build a table of the runs' and the paper's columns; both average and count the same rows.

    Args:
        noun: what a row is, "domain" or "task".
        setting: setting of the paper.
        sides: figures of the runs by label, and of the paper by method, with the same rows.
        both: names of the rows that averages and counts include.
        baseline: label of the runs' baseline, if there is one.
        notes: notes that follow the note on the paper.
        metric: metric of the tasks.
    """
    form, best = (format_perplexity, min) if noun == "domain" else ("{:.1f}".format, max)
    (printed, *_), title = (
        (setting.perplexity, f"held-out perplexity ({setting.label})")
        if noun == "domain"
        else (setting.downstream, f"downstream accuracy by {metric} ({setting.label})")
    )
    texts, averages, counts = [], [], []
    for figures, reference in zip(sides, (baseline, setting.baseline), strict=True):
        texts.append(formatted(figures, form, best))
        shared = figures.loc[list(both)]
        averages += cells_of(shared.mean(), form, best)
        counts += counts_better(shared, reference, best)
    ours, theirs = texts
    paper = METHOD_LABELS[setting.baseline]
    theirs.columns = [f"{PAPER}{METHOD_LABELS.get(method, method)}" for method in theirs]
    than = paper if baseline in (None, paper) else f"{baseline} (the paper: {paper})"
    summary = [["average", *averages], [f"{noun}s better than {than}", *counts]]
    first = (
        f"The paper's columns are from {_content()['source']}, '{printed['caption']}'; their "
        "averages and counts are recomputed. The best of each row is marked, separately for these "
        "runs and for the paper."
    )
    table = pd.concat([ours, theirs], axis=1)
    return Table.by_row(f"{TITLE}{title}", noun, table, summary if both else (), [first, *notes])


def _weights_table(
    setting: Setting, names: Mapping[str, str], folder: RunFolder, comparison: ComparedRuns | None
) -> Table:
    """Table of the distinct weights of the evaluated runs, and of the paper's weights.

    If no run was evaluated, the table has the weights of all base runs; if there is no base run,
    the weights of all mixtures.
    """
    found: dict[str, Mapping[str, float]] = {n: m.weights for n, m in folder.mixtures.items()}
    if comparison is not None:
        found = {run.label: run.run.mixture for run in comparison.runs if run.run}
    elif folder.base_runs:
        labels = run_labels(folder.base_runs, folder.base_runs)
        found = {labels[name]: run.mixture for name, run in folder.base_runs.items()}
    columns: dict[str, Mapping[str, float]] = {}
    for label, weights in found.items():
        if weights and not any(same_weights(weights, other) for other in columns.values()):
            columns[label] = weights
    for method, column in setting.columns.items():
        printed = {name: column.printed[row] for name, row in names.items()}
        columns[f"{PAPER}{METHOD_LABELS.get(method, method)}"] = printed
    shares = pd.DataFrame(columns, index=list(names)).fillna(0.0)
    return Table.by_row(
        f"{TITLE}weights ({setting.data['label']})",
        "domain",
        formatted(shares, four_decimals),
        [["sum", *shares.sum().map(four_decimals)]],
        [f"The paper's weights are as printed in {_content()['source']}."],
    )


def _cost_table(setting: Setting, folder: RunFolder) -> list[Table]:
    """Table of each mixture's cost, and of the cost that the paper prints for its method."""
    others: dict[str, float] = setting.data.get("other_flops", {})
    flops = {m: c.flops for m, c in setting.columns.items() if c.flops is not None} | others
    mixtures = ledger_of(folder).mixtures
    if not flops or not mixtures:
        return []

    def printed(method: str) -> list[str]:
        hours = setting.data.get("gpu_hours", {}).get(method)
        count = flops.get(method)
        shown = MISSING if count is None else format_flops(count) if count else "0"
        return [shown, MISSING if hours is None else f"{hours:g}"]

    rows, methods = [], set()
    for name, cost in mixtures.items():
        method = PAPER_METHODS.get(cost.mixture.method, cost.mixture.method)
        methods.add(method)
        rows.append([name, *cost.cells(), format_flops(cost.paper_flops), *printed(method)])
    # Methods without cost come first.
    rows += [
        [f"{METHOD_LABELS.get(method, method)} (not here)", *[MISSING] * 3, *printed(method)]
        for method in sorted(flops, key=lambda method: flops[method] > 0)
        if method not in methods
    ]
    notes = [
        f"The paper, {_content()['source']}, counts 6 FLOPs per parameter and trained token "
        "and 2 per embedded token, without attention scores and the output layer."
    ]
    if setting.data_set == "pile":
        notes.append(
            "On the Pile, the paper counts additional FLOPs only: Chameleon reuses its proxy from "
            "SlimPajama, and the other methods train new proxies."
        )
    notes += [
        f"Training the base model of {size} took {hours:g} H100 hours."
        for size, hours in setting.data.get("base_gpu_hours", {}).items()
    ]
    header = ["mixture", "FLOPs", "device-hours", "FLOPs as the paper counts"]
    header += [f"{PAPER}FLOPs", f"{PAPER}H100 hours"]
    title = f"{TITLE}cost to obtain each mixture ({setting.data['label']})"
    return [Table.of(title, header, rows, notes=notes)]
