"""A run's tables with the figures printed in Chameleon's paper, if both have the same setting.

paper_results.json has the figures as printed; averages and counts are recomputed from the rows. The
paper's weights and the FLOPs to obtain them are in
``artifacts.published``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import pandas as pd

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.downstream_result import Accuracy
from megatron_chameleon.artifacts.published import PublishedColumn, published_column
from megatron_chameleon.report.comparison import Comparison
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.downstream import base_run_of, compare_downstream
from megatron_chameleon.report.run_folder import RunFolder, run_labels, same_weights
from megatron_chameleon.report.tables import (
    MISSING,
    Table,
    cells_of,
    format_flops,
    format_perplexity,
    format_weight,
)

LABELS = {
    "uniform": "Uniform",
    "human": "Human",
    "doremi": "DoReMi",
    "doge": "DoGE",
    "chameleon": "Chameleon",
    "chameleon-pretrain": "Chameleon (pretraining)",
    "chameleon-finetune": "Chameleon (fine-tuning)",
    "regmix": "RegMix",
    "mixing-laws": "Data Mixing Laws",
}
# Before the titles of tables with columns of both sides, and before the headings of the paper's.
TITLE, PAPER = "Next to the paper: ", "paper: "
# The paper does not print the training tokens of its base models; these are the assumptions of
# examples/hyperparameters.sh. The 10,000 steps are the paper's for fine-tuning.
ASSUMED_STEPS, ASSUMED_SEQ_LENGTH = 10_000, 1024
# Runs with half to twice as many tokens match the setting.
TOKEN_FACTOR = 2.0
SHOTS = [0, 1, 2, 3, 4, 5]
PREFIXES = ("redpajama", "slimpajama", "thepile", "pile", "wiki40b", "thestack", "stack")
# Methods that the paper's columns name differently.
PAPER_METHODS = {"chameleon-pretrain": "chameleon"}


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A printed table of perplexities or of accuracies in percent.

    Attributes:
        caption: as printed.
        columns: method -> its ``printed`` figures by domain or task, their printed ``average`` and,
            where printed, in how many rows it is ``better`` than the baseline.
    """

    caption: str
    columns: Mapping[str, Mapping[str, Any]]

    @property
    def figures(self) -> pd.DataFrame:
        """By domain or task (rows) and method (columns)."""
        return pd.DataFrame({method: c["printed"] for method, c in self.columns.items()})


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set of the paper.

    Attributes:
        name: as in ``artifacts.published``.
        label: as in a sentence.
        weights: methods whose final weights are printed.
        spellings: alternative names of its domains, in lower case, letters and digits only.
        other_flops: method -> FLOPs, of methods without printed weights.
        gpu_hours: method -> H100 hours to obtain the weights.
        base_gpu_hours: model size -> H100 hours to train it.
    """

    name: str
    label: str
    weights: Sequence[str]
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpu_hours: Mapping[str, float] = dataclasses.field(default_factory=dict)
    base_gpu_hours: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> dict[str, PublishedColumn]:
        """Method -> printed weights, with the FLOPs to obtain them."""
        return {method: published_column(f"{self.name}/{method}") for method in self.weights}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model on one data set; the first table of each kind is the main one.

    Attributes:
        data_set: trained and evaluated on.
        size: name of the model's size.
        model: its dimensions, with the keys of a run's record.
        batch_size: sequences per step.
        baseline: the method that the others are counted against.
        perplexity: tables of held-out perplexity per domain.
        downstream: tables of accuracy per task in percent, the mean over 0 to 5 shots.
        fine_tuned: whether the model started from weights trained on the Pile.
    """

    data_set: DataSet
    size: str
    model: Mapping[str, int]
    batch_size: int
    baseline: str
    perplexity: Sequence[PaperTable]
    downstream: Sequence[PaperTable]
    fine_tuned: bool = False

    @property
    def label(self) -> str:
        """The data set and the size."""
        return f"{self.data_set.label}, {self.size}"

    @property
    def tokens(self) -> int:
        """Assumed training tokens."""
        return ASSUMED_STEPS * self.batch_size * ASSUMED_SEQ_LENGTH


@dataclasses.dataclass(frozen=True)
class Kind:
    """Perplexities or accuracies.

    Attributes:
        row: noun for a row: domain or task.
        form: formats a figure.
        best: picks the best of several.
    """

    row: str
    form: Callable[[float], str]
    best: Callable[[list[float]], float]

    def better(self, figures: pd.DataFrame, method: str, baseline: str) -> int:
        """In how many rows the method is better than the baseline."""
        gaps = figures[method] - figures[baseline]
        return int(((gaps < 0) if self.best is min else (gaps > 0)).sum())


PERPLEXITY = Kind("domain", format_perplexity, min)
ACCURACY = Kind("task", "{:.1f}".format, max)


def source() -> str:
    """The paper's citation."""
    cited: str = _content()["source"]
    return cited


@functools.cache
def paper_settings() -> Mapping[str, Setting]:
    """Name -> setting, in the order of the file."""
    content = _content()
    return {
        name: Setting(
            **found
            | {
                "data_set": DataSet(found["data_set"], **content["data_sets"][found["data_set"]]),
                "model": content["models"][found["size"]],
                "perplexity": [PaperTable(**table) for table in found["perplexity"]],
                "downstream": [PaperTable(**table) for table in found["downstream"]],
            }
        )
        for name, found in content["settings"].items()
    }


@functools.cache
def _content() -> Mapping[str, Any]:
    file = resources.files("megatron_chameleon.report").joinpath("paper_results.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def paper_names(data_set: DataSet, domains: Iterable[str]) -> dict[str, str] | None:
    """Domain -> the paper's name of it; None unless they are all of its domains, each once."""

    def plain(name: str) -> str:
        return "".join(sign for sign in name.casefold() if sign.isalnum() or sign == "+")

    column = next(iter(data_set.columns.values()))
    known = {plain(name): name for name in column.printed}
    known |= {plain(own): name for own, name in column.own_names.items()}
    known |= data_set.spellings
    names = {}
    for domain in domains:
        name = plain(domain)
        # Without the name of the data set in front.
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        names[domain] = known.get(name) or known.get(name.removeprefix(prefix)) or ""
    return names if sorted(names.values()) == sorted(column.printed) else None


def paper_tables(
    folder: RunFolder, comparison: Comparison | None, baseline: str | None = None
) -> list[Table]:
    """Each of the run's tables with the paper's columns next to its own.

    The setting is that of the corpus's domains (in any spelling), the model's size and, roughly,
    the training tokens; without evaluated runs, it is matched to the runs with downstream results,
    or all base runs. Where only the domains match, one table lists the differences and none of
    the paper's figures are shown.

    Args:
        folder: of the run.
        comparison: its evaluated runs; None where no perplexity was evaluated.
        baseline: name of the baseline run, used where ``comparison`` has none.

    Returns:
        The tables; none for other domains than the paper's.

    Raises:
        UserError: if an artifact is damaged, or downstream results cannot be compared.
    """
    domains = [*comparison.domains, *comparison.left_out] if comparison else []
    if folder.corpus is not None:
        domains = folder.corpus.names
    candidates = [
        (setting, names)
        for setting in paper_settings().values()
        if (names := paper_names(setting.data_set, domains)) is not None
    ]
    if not candidates:
        return []
    runs: list[TrainingRun | None]
    if comparison is not None:
        runs = [run.run for run in comparison.runs]
    else:
        runs = [folder.base_runs.get(base_run_of(folder, name)) for name in folder.downstream]
        runs = runs or list(folder.base_runs.values())
    sizes = [None if run is None else run.model.get("size") for run in runs]
    fitting = [pair for pair in candidates if all(size == pair[0].model for size in sizes)]
    setting, names = (fitting or candidates)[0]
    differences = _differences(runs, setting, is_model=bool(fitting))
    if differences:
        printed = [*setting.perplexity[:1], *setting.downstream[:1]]
        return [_differences_table(setting, differences, printed)]
    tables = [] if comparison is None else [_perplexity_table(setting, names, comparison)]
    if setting.downstream:
        if comparison is not None and comparison.baseline is not None:
            baseline = comparison.baseline.name
        tables += _downstream_table(setting, folder, baseline)
    tables.append(_weights_table(setting.data_set, names, folder, comparison))
    return tables + _cost_table(setting.data_set, folder)


def _differences(
    runs: Sequence[TrainingRun | None], setting: Setting, is_model: bool
) -> list[list[str]]:
    """Differences in model, tokens and initial weights, as rows: aspect, here, the paper."""
    rows = []
    known = [run for run in runs if run is not None]
    if not is_model:
        models: dict[str, None] = {}
        for run in runs:
            size = {} if run is None else run.model.get("size")
            text = "unknown (its run is not in 5-base)"
            if run is not None:
                text = f"{run.parameters:,} parameters"
            if isinstance(size, dict) and {"num_layers", "hidden_size"} <= set(size):
                text = f"{size['num_layers']} layers of width {size['hidden_size']:,} ({text})"
            models[text] = None
        layers, width = setting.model["num_layers"], setting.model["hidden_size"]
        paper = f"{setting.size}: {layers} layers of width {width:,}"
        rows.append(["model", ", ".join(models), paper])
    tokens, expected = [run.tokens for run in known], setting.tokens
    if not all(expected / TOKEN_FACTOR <= count <= expected * TOKEN_FACTOR for count in tokens):
        ends = dict.fromkeys((f"{min(tokens):,}", f"{max(tokens):,}"))
        rows.append(["training tokens", " to ".join(ends), f"{expected:,} (assumed)"])
    started = {"pretrained checkpoint" in run.provenance.inputs for run in known}
    if not started <= {setting.fine_tuned}:
        words = {True: "trained weights", False: "random weights"}
        paper = "weights trained on the Pile" if setting.fine_tuned else words[False]
        rows.append(["start", " and ".join(words[each] for each in sorted(started)), paper])
    return rows


def _differences_table(
    setting: Setting, rows: Sequence[Sequence[str]], tables: Sequence[PaperTable]
) -> Table:
    captions = " and ".join(f"'{table.caption}'" for table in tables)
    notes = [
        f"{source()}, has {captions} for {setting.label}. The setting of these runs differs, so "
        "the paper's figures are not shown.",
        f"The paper does not print its training tokens; {setting.tokens:,} are assumed.",
    ]
    header = ["setting", "these runs", "the paper"]
    return Table.of(f"{TITLE}different setting", header, rows, (), notes)


def _perplexity_table(setting: Setting, names: Mapping[str, str], comparison: Comparison) -> Table:
    left_out, baseline = comparison.left_out, comparison.baseline
    notes = [f"Not in any average or count here: {', '.join(left_out)}."] if left_out else []
    notes.append(
        "The paper does not print its training tokens, sequence length and tokenizer: compare "
        "columns within one side only."
    )
    columns = {}
    for run in comparison.runs:
        figures: dict[str, float | None] = comparison.perplexity[run.name].to_dict()
        compared = baseline is not None and run is not baseline
        better = comparison.domains_better([run], comparison.runs[:1]) if compared else None
        columns[run.label] = (figures, run.result.mean_perplexity, better)
    rows = {name: names[name] for name in (*comparison.domains, *left_out)}
    both = [names[name] for name in comparison.domains]
    title = f"{TITLE}held-out perplexity ({setting.label})"
    label = baseline.label if baseline else None
    table = setting.perplexity[0]
    return _both_sides(PERPLEXITY, setting, table, title, rows, both, columns, label, notes)


def _downstream_table(setting: Setting, folder: RunFolder, baseline: str | None) -> list[Table]:
    table, found = setting.downstream[0], compare_downstream(folder, baseline)
    if found is None:
        return []
    protocol, different = found.runs[0].result.protocol, []
    if sorted(protocol.shots) != SHOTS:
        shots = (", ".join(map(str, each)) for each in (protocol.shots, SHOTS))
        different.append(["shots of downstream tasks", *shots])
    if protocol.limit is not None:
        different.append(["questions of each task", f"the first {protocol.limit:,}", "all"])
    if different:
        return [_differences_table(setting, different, [table])]
    both = [task for task in found.complete() if task in table.figures.index]

    def percent(accuracy: Accuracy | None) -> float | None:
        return None if accuracy is None else 100 * accuracy.accuracy

    columns = {}
    for run in found.runs:
        figures = {task: percent(run.accuracy(task)) for task in found.tasks}
        compared = found.baseline is not None and run is not found.baseline
        better = found.tasks_better(run, both) if compared else None
        columns[run.label] = (figures, percent(run.average(both)), better)
    notes = [
        f"Averages and counts are over the {len(both)} tasks that all runs and the paper have.",
    ]
    rows = {task: task for task in found.tasks}
    title = f"{TITLE}downstream accuracy ({setting.label})"
    label = found.baseline.label if found.baseline else None
    return [_both_sides(ACCURACY, setting, table, title, rows, both, columns, label, notes)]


def _both_sides(
    kind: Kind,
    setting: Setting,
    table: PaperTable,
    title: str,
    rows: Mapping[str, str],
    both: Sequence[str],
    ours: Mapping[str, tuple[Mapping[str, float | None], float | None, int | None]],
    baseline: str | None,
    notes: Iterable[str],
) -> Table:
    """The runs' columns, then the paper's, with averages and counts over the same rows.

    Args:
        kind: of the figures.
        setting: with the paper's baseline.
        table: the paper's.
        title: of the made table.
        rows: name -> the paper's name.
        both: the paper's names of the rows in averages and counts.
        ours: label -> figures by name, their average, and the count of rows that are better than
            the baseline's (None for the baseline itself, and without one).
        baseline: label of the runs' baseline, if there is one.
        notes: after that on the paper.
    """
    printed, paper = table.figures, LABELS[setting.baseline]
    theirs = {}
    for method in printed:
        shared = printed.loc[list(both)]
        better = kind.better(shared, method, setting.baseline)
        theirs[f"{PAPER}{LABELS.get(method, method)}"] = (
            printed[method].to_dict(),
            _mean(shared[method]) if both else None,
            None if method == setting.baseline else better,
        )
    sides = [list(ours.values()), list(theirs.values())]

    body = [
        [
            name,
            *cells_of((figures.get(name) for figures, *_ in ours.values()), kind.form, kind.best),
            *cells_of((figures.get(row) for figures, *_ in theirs.values()), kind.form, kind.best),
        ]
        for name, row in rows.items()
    ]
    summary = []
    if both:
        averages = [cells_of((a for _, a, _ in side), kind.form, kind.best) for side in sides]
        counts = [
            [MISSING if count is None else f"{count} of {len(both)}" for *_, count in side]
            for side in sides
        ]
        summary.append(["average", *averages[0], *averages[1]])
        better_than = f"{kind.row}s better than"
        if baseline == paper:
            summary.append([f"{better_than} {paper}", *counts[0], *counts[1]])
        else:
            if baseline:
                summary.append([f"{better_than} {baseline}", *counts[0], *[""] * len(theirs)])
            blank = [""] * len(ours)
            summary.append([f"{better_than} {paper} (the paper's)", *blank, *counts[1]])
    first = (
        f"The paper is {source()}, '{table.caption}'. The best of each row is marked, separately "
        "for these runs and for the paper's columns, whose averages and counts are recomputed."
    )
    return Table.of(title, [kind.row, *ours, *theirs], body, summary, [first, *notes])


def _mean(figures: pd.Series[float]) -> float:
    return math.fsum(figures) / len(figures)


def _weights_table(
    data_set: DataSet, names: Mapping[str, str], folder: RunFolder, comparison: Comparison | None
) -> Table:
    """The distinct weights that the evaluated runs were trained with, and the paper's.

    Without evaluated runs, those of all base runs; without these, all mixtures.
    """
    found: dict[str, Mapping[str, float]] = {n: m.weights for n, m in folder.mixtures.items()}
    if comparison is not None:
        found = {run.label: run.run.mixture for run in comparison.runs if run.run}
    elif folder.base_runs:
        labels = run_labels(folder.base_runs, folder.base_runs)
        found = {labels[name]: run.mixture for name, run in folder.base_runs.items()}
    ours: dict[str, Mapping[str, float]] = {}
    for label, weights in found.items():
        if weights and not any(same_weights(weights, other) for other in ours.values()):
            ours[label] = weights
    theirs = {LABELS.get(method, method): c for method, c in data_set.columns.items()}
    rows = [
        [w.get(name, 0.0) for w in ours.values()] + [c.printed[row] for c in theirs.values()]
        for name, row in names.items()
    ]
    sums = [math.fsum(weights.values()) for weights in ours.values()]
    sums += [column.printed_sum for column in theirs.values()]
    return Table.of(
        f"{TITLE}weights ({data_set.label})",
        ["domain", *ours, *(f"{PAPER}{label}" for label in theirs)],
        [[name, *map(format_weight, row)] for name, row in zip(names, rows, strict=True)],
        [["sum", *map(format_weight, sums)]],
        [f"The paper is {source()}; its weights are as printed."],
    )


def _cost_table(data_set: DataSet, folder: RunFolder) -> list[Table]:
    """The cost of each mixture of the folder, and the printed cost of its method."""
    # Free methods first.
    flops = {method: 0.0 for method, count in data_set.other_flops.items() if not count}
    flops |= {m: column.flops for m, column in data_set.columns.items() if column.flops is not None}
    flops |= data_set.other_flops
    mixtures = ledger_of(folder).mixtures
    if not flops or not mixtures:
        return []

    def printed(method: str) -> list[str]:
        if method not in flops:
            return [MISSING, MISSING]
        hours = data_set.gpu_hours.get(method)
        shown = "0" if flops[method] == 0 else format_flops(flops[method])
        return [shown, MISSING if hours is None else f"{hours:g}"]

    methods = {
        name: PAPER_METHODS.get(cost.mixture.method, cost.mixture.method)
        for name, cost in mixtures.items()
    }
    rows = [
        [name, *cost.cells(), format_flops(cost.paper_flops), *printed(methods[name])]
        for name, cost in mixtures.items()
    ]
    rows += [
        [f"{LABELS.get(method, method)} (not here)", *[MISSING] * 3, *printed(method)]
        for method in flops
        if method not in methods.values()
    ]
    notes = [
        f"The paper is {source()}. It counts 6 FLOPs per parameter and token trained, 2 per token "
        "embedded, without attention scores and output layer."
    ]
    if data_set.name == "pile":
        notes.append(
            "On the Pile the FLOPs are additional ones: Chameleon reuses its proxy from "
            "SlimPajama, the other methods train new ones."
        )
    notes += [
        f"Training the base model of {size} took {hours:g} H100 hours."
        for size, hours in data_set.base_gpu_hours.items()
    ]
    header = ["mixture", "FLOPs", "device-hours", "FLOPs as the paper counts"]
    header += [f"{PAPER}FLOPs", f"{PAPER}H100 hours"]
    title = f"{TITLE}cost to obtain each mixture ({data_set.label})"
    return [Table.of(title, header, rows, notes=notes)]
