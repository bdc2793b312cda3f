"""A run's tables with the figures printed in Chameleon's paper, if both have the same setting.

paper_results.json has the figures as printed; averages and counts are recomputed from the rows, and
a note lists printed ones that differ. The paper's weights and the FLOPs to obtain them are in
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

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.downstream_result import Accuracy, DownstreamProtocol
from megatron_chameleon.artifacts.published import PublishedColumn, published_column
from megatron_chameleon.report.comparison import Comparison
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.downstream import (
    DownstreamComparison,
    base_run_of,
    compare_downstream,
)
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
# Sums of printed weights are noted where they are further from 1 than this.
SUM_UNIT = 5e-4


@dataclasses.dataclass(frozen=True)
class PaperColumn:
    """A printed column: domain or task -> figure, its printed average and count.

    ``better`` is the printed number of rows better than the baseline's; None where not printed.
    """

    printed: Mapping[str, float]
    average: float
    better: int | None = None

    def average_of(self, rows: Iterable[str]) -> float:
        """The average of these rows, at least one, recomputed."""
        found = [self.printed[row] for row in rows]
        return math.fsum(found) / len(found)


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A printed table of perplexities or of accuracies in percent: method -> column."""

    caption: str
    columns: Mapping[str, PaperColumn]

    @property
    def rows(self) -> list[str]:
        """Domains or tasks, in printed order."""
        return list(next(iter(self.columns.values())).printed)


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
        doge_step_ratio: wall time of a step of DoGE's proxy relative to a plain step.
    """

    name: str
    label: str
    weights: Sequence[str]
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpu_hours: Mapping[str, float] = dataclasses.field(default_factory=dict)
    base_gpu_hours: Mapping[str, float] = dataclasses.field(default_factory=dict)
    doge_step_ratio: float | None = None

    def weight_columns(self) -> dict[str, PublishedColumn]:
        """Method -> printed weights, with the FLOPs to obtain them."""
        return {method: published_column(f"{self.name}/{method}") for method in self.weights}

    def flops(self) -> dict[str, float]:
        """Method -> FLOPs to obtain its weights, where printed; free methods first."""
        columns = self.weight_columns()
        found = {method: c.flops for method, c in columns.items() if c.flops is not None}
        free = {method: 0.0 for method, flops in self.other_flops.items() if not flops}
        return {**free, **found, **self.other_flops}


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
        unit: the last printed decimal place.
        form: formats a figure.
        best: picks the best of several.
        row: what a row stands for: a domain or a task.
    """

    unit: float
    form: Callable[[float], str]
    best: Callable[[list[float]], float]
    row: str

    def cells(self, figures: Iterable[float | None]) -> list[str]:
        """One row of one side's columns, the best marked."""
        return cells_of(figures, self.form, self.best)

    def better_than(self, column: PaperColumn, baseline: PaperColumn, rows: Sequence[str]) -> int:
        """In how many of ``rows`` the column is better than the baseline's."""
        pairs = [(column.printed[row], baseline.printed[row]) for row in rows]
        return sum(a != b and self.best([a, b]) == a for a, b in pairs)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of either side: figures by row, their average, and how many beat the baseline's.

    ``better`` is None for the baseline itself, and without one.
    """

    label: str
    figures: Mapping[str, float | None]
    average: float | None
    better: int | None


PERPLEXITY = Kind(0.01, format_perplexity, min, "domain")
ACCURACY = Kind(0.1, "{:.1f}".format, max, "task")


def source() -> str:
    """The paper's citation."""
    cited: str = _content()["source"]
    return cited


@functools.cache
def paper_settings() -> Mapping[str, Setting]:
    """Name -> setting, in the order of the file."""
    content, settings = _content(), {}
    for name, found in content["settings"].items():
        data_set = DataSet(name=found["data_set"], **content["data_sets"][found["data_set"]])
        tables = {
            kind: [
                PaperTable(t["caption"], {m: PaperColumn(**c) for m, c in t["columns"].items()})
                for t in found[kind]
            ]
            for kind in ("perplexity", "downstream")
        }
        changes = {"data_set": data_set, "model": content["models"][found["size"]], **tables}
        settings[name] = Setting(**{**found, **changes})
    return settings


@functools.cache
def _content() -> Mapping[str, Any]:
    file = resources.files("megatron_chameleon.report").joinpath("paper_results.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def match_setting(
    folder: RunFolder, comparison: Comparison | None
) -> tuple[Setting, Mapping[str, str], list[list[str]]] | None:
    """The paper's setting that best matches the evaluated runs; None for other domains.

    Without evaluated runs it is matched to the runs with downstream results, or all base runs.

    Returns:
        The first setting with these domains and the runs' model, or else with these domains; domain
        of the corpus -> name in the paper's columns; and the differences: aspect, these runs,
        paper.
    """
    if folder.corpus is not None:
        domains = folder.corpus.names
    else:
        domains = [*comparison.domains, *comparison.left_out] if comparison else []
    candidates = [
        (setting, names)
        for setting in paper_settings().values()
        if (names := paper_names(setting.data_set, domains)) is not None
    ]
    if not candidates:
        return None
    runs: list[TrainingRun | None]
    if comparison is not None:
        runs = [run.run for run in comparison.runs]
    else:
        runs = [folder.base_runs.get(base_run_of(folder, name)) for name in folder.downstream]
        runs = runs or list(folder.base_runs.values())
    sizes = [None if run is None else run.model.get("size") for run in runs]
    fitting = [pair for pair in candidates if all(size == pair[0].model for size in sizes)]
    setting, names = (fitting or candidates)[0]
    return setting, names, _differences_of(runs, setting, is_model=bool(fitting))


def paper_names(data_set: DataSet, domains: Iterable[str]) -> dict[str, str] | None:
    """Domain -> the paper's name of it; None unless they are all of its domains, each once."""

    def plain(name: str) -> str:
        return "".join(sign for sign in name.casefold() if sign.isalnum() or sign == "+")

    def bare(name: str) -> str:
        """Without the name of the data set in front."""
        prefix = next((p for p in PREFIXES if plain(name).startswith(p)), "")
        return plain(name).removeprefix(prefix)

    column = next(iter(data_set.weight_columns().values()))
    known = {plain(name): name for name in column.printed}
    known |= {plain(own): name for own, name in column.own_names.items()}
    known |= data_set.spellings
    found = {domain: known.get(plain(domain)) or known.get(bare(domain)) for domain in domains}
    names = {domain: name for domain, name in found.items() if name is not None}
    is_one_to_one = len(set(names.values())) == len(names) == len(found)
    return names if is_one_to_one and set(names.values()) == set(column.printed) else None


def _differences_of(
    runs: Sequence[TrainingRun | None], setting: Setting, is_model: bool
) -> list[list[str]]:
    """Differences in model, tokens and initial weights, as rows: aspect, here, the paper."""
    rows = []
    if not is_model:
        layers, width = setting.model["num_layers"], setting.model["hidden_size"]
        ours = ", ".join(dict.fromkeys(map(_describe_model, runs)))
        rows.append(["model", ours, f"{setting.size}: {layers} layers of width {width:,}"])
    known = [run for run in runs if run is not None]
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


def _describe_model(run: TrainingRun | None) -> str:
    if run is None:
        return "unknown (its run is not in 5-base)"
    size, parameters = run.model.get("size"), f"{run.parameters:,} parameters"
    if not isinstance(size, dict) or not {"num_layers", "hidden_size"} <= set(size):
        return parameters
    return f"{size['num_layers']} layers of width {size['hidden_size']:,} ({parameters})"


def paper_tables(
    folder: RunFolder, comparison: Comparison | None, baseline: str | None = None
) -> list[Table]:
    """Each of the run's tables with the paper's columns next to its own.

    The setting is that of the corpus's domains (in any spelling), the model's size and, roughly,
    the training tokens. Where only the domains match, one table lists the differences and none of
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
    match = match_setting(folder, comparison)
    if match is None:
        return []
    setting, names, differences = match
    if differences:
        printed = [*setting.perplexity[:1], *setting.downstream[:1]]
        return [_differences_table(setting, differences, printed)]
    if comparison is not None and comparison.baseline is not None:
        baseline = comparison.baseline.name
    downstream = compare_downstream(folder, baseline) if setting.downstream else None
    return [
        *([] if comparison is None else [_perplexity_table(setting, names, comparison)]),
        *([] if downstream is None else [_downstream_table(setting, downstream)]),
        _weights_table(setting.data_set, names, folder, comparison),
        *_cost_table(setting.data_set, folder),
    ]


def _differences_table(
    setting: Setting, rows: Sequence[Sequence[str]], tables: Sequence[PaperTable]
) -> Table:
    captions = " and ".join(f"'{table.caption}'" for table in tables)
    notes = [
        f"{source()}, has {captions} for {setting.label}. The setting of these runs differs, so "
        "the paper's figures are not shown.",
        f"The paper's training tokens are {describe_tokens(setting)}, or half to twice as many.",
    ]
    return Table.of(
        f"{TITLE}different setting", ["setting", "these runs", "the paper"], rows, (), notes
    )


def describe_tokens(setting: Setting) -> str:
    """The assumed training tokens of a setting."""
    return (
        f"not printed; assumed to be {ASSUMED_STEPS:,} steps of {setting.batch_size} x "
        f"{ASSUMED_SEQ_LENGTH:,} = {setting.tokens:,}"
    )


def _perplexity_table(setting: Setting, names: Mapping[str, str], comparison: Comparison) -> Table:
    left_out, baseline = comparison.left_out, comparison.baseline
    columns = [
        Column(
            run.label,
            comparison.perplexity[run.name].to_dict(),
            run.result.mean_perplexity,
            None if baseline in (None, run) else comparison.domains_better(run),
        )
        for run in comparison.runs
    ]
    notes = [f"Not in any average or count here: {', '.join(left_out)}."] if left_out else []
    notes.append(
        f"The paper's training tokens are {describe_tokens(setting)}; it does not print its "
        "sequence length and tokenizer either. Compare columns within one side only."
    )
    rows = {name: names[name] for name in (*comparison.domains, *left_out)}
    both = [names[name] for name in comparison.domains]
    title = f"{TITLE}held-out perplexity ({setting.label})"
    label = baseline.label if baseline else None
    return _both_sides(PERPLEXITY, setting, title, rows, both, columns, label, notes)


def _downstream_table(setting: Setting, found: DownstreamComparison) -> Table:
    table, baseline = setting.downstream[0], found.baseline
    different = downstream_differences(found.runs[0].result.protocol)
    if different:
        return _differences_table(setting, different, [table])
    both = [task for task in found.complete if task in table.rows]

    def percent(accuracy: Accuracy | None) -> float | None:
        return None if accuracy is None else 100 * accuracy.accuracy

    columns = [
        Column(
            run.label,
            {task: percent(run.mean(task)) for task in found.tasks},
            percent(run.average(both)),
            None if baseline in (None, run) else found.tasks_better(run, both),
        )
        for run in found.runs
    ]
    notes = [
        f"Averages and counts are over the {len(both)} tasks that all runs and the paper have.",
        "The paper does not print lm-eval's version; task definitions differ across versions.",
    ]
    rows = dict(zip(found.tasks, found.tasks, strict=True))
    title = f"{TITLE}downstream accuracy ({setting.label})"
    label = baseline.label if baseline else None
    return _both_sides(ACCURACY, setting, title, rows, both, columns, label, notes)


def downstream_differences(protocol: DownstreamProtocol) -> list[list[str]]:
    """Differences from the paper's downstream protocol, as rows."""
    rows = []
    if sorted(protocol.shots) != SHOTS:
        shots = (", ".join(map(str, each)) for each in (protocol.shots, SHOTS))
        rows.append(["shots of downstream tasks", *shots])
    if protocol.limit is not None:
        rows.append(["questions of each task", f"the first {protocol.limit:,}", "all"])
    return rows


def _both_sides(
    kind: Kind,
    setting: Setting,
    title: str,
    rows: Mapping[str, str],
    both: Sequence[str],
    ours: Sequence[Column],
    baseline: str | None,
    notes: Iterable[str],
) -> Table:
    """The runs' columns, then the paper's, with averages and counts over the same rows.

    Args:
        kind: of the figures.
        setting: with the paper's table and baseline.
        title: of the made table.
        rows: name -> the paper's name.
        both: the paper's names of the rows in averages and counts.
        ours: the runs' columns.
        baseline: label of the runs' baseline, if there is one.
        notes: after those on the paper.
    """
    table = (setting.perplexity if kind is PERPLEXITY else setting.downstream)[0]
    printed, paper = table.columns, method_label(setting.baseline)
    theirs = [
        Column(
            f"{PAPER}{method_label(method)}",
            column.printed,
            column.average_of(both) if both else None,
            None
            if method == setting.baseline
            else kind.better_than(column, printed[setting.baseline], both),
        )
        for method, column in printed.items()
    ]
    sides = (ours, theirs)
    averages = [cell for side in sides for cell in kind.cells(c.average for c in side)]
    counts = [
        [MISSING if c.better is None else f"{c.better} of {len(both)}" for c in side]
        for side in sides
    ]
    better = f"{kind.row}s better than"
    summary = []
    if both:
        summary.append(["average", *averages])
        if baseline == paper:
            summary.append([f"{better} {paper}", *counts[0], *counts[1]])
        else:
            if baseline:
                summary.append([f"{better} {baseline}", *counts[0], *[""] * len(theirs)])
            summary.append([f"{better} {paper} (the paper's)", *[""] * len(ours), *counts[1]])
    note = "The paper's averages and counts are recomputed from its rows."
    found = disagreements(kind, table, setting.baseline)
    if found:
        note += f" Beyond rounding, it prints other values: {'; '.join(found)}."
    return Table.of(
        title,
        [kind.row, *(column.label for side in sides for column in side)],
        [
            [
                name,
                *kind.cells(column.figures.get(name) for column in ours),
                *kind.cells(column.figures.get(row) for column in theirs),
            ]
            for name, row in rows.items()
        ],
        summary,
        [
            f"The paper is {source()}, '{table.caption}'. The best of each row is marked, "
            "separately for these runs and for the paper's columns.",
            note,
            *notes,
        ],
    )


def method_label(method: str) -> str:
    """Heading of a method's column."""
    return LABELS.get(method, method)


def disagreements(kind: Kind, table: PaperTable, baseline: str) -> list[str]:
    """Printed averages and counts that do not follow from the printed rows, beyond rounding."""
    found = []
    for method, column in table.columns.items():
        average = column.average_of(table.rows)
        if abs(average - column.average) > kind.unit + 1e-9:
            found.append(
                f"average of {method_label(method)} {kind.form(column.average)} "
                f"(its rows: {kind.form(average)})"
            )
        if column.better is not None:
            better = kind.better_than(column, table.columns[baseline], table.rows)
            if better != column.better:
                found.append(
                    f"{kind.row}s in which {method_label(method)} is better than "
                    f"{method_label(baseline)} {column.better} (its rows: {better})"
                )
    return found


def _weights_table(
    data_set: DataSet, names: Mapping[str, str], folder: RunFolder, comparison: Comparison | None
) -> Table:
    """The distinct weights that the evaluated runs were trained with, and the paper's.

    Without evaluated runs, those of all base runs; without these, all mixtures.
    """
    columns = data_set.weight_columns()
    mixtures: dict[str, Mapping[str, float]] = {}
    for label, weights in _weights_here(folder, comparison):
        if weights and not any(same_weights(weights, other) for other in mixtures.values()):
            mixtures[label] = weights
    sums = [math.fsum(weights.values()) for weights in mixtures.values()]
    sums += [column.printed_sum for column in columns.values()]
    odd = [
        f"{method_label(method)} {column.printed_sum:.4f}"
        for method, column in columns.items()
        if abs(column.printed_sum - 1) > SUM_UNIT
    ]
    notes = [f"The paper is {source()}; its weights are as printed."]
    if odd:
        notes.append(
            f"Printed weights that do not sum to 1: {', '.join(odd)}; normalize them to use."
        )
    return Table.of(
        f"{TITLE}weights ({data_set.label})",
        ["domain", *mixtures, *(f"{PAPER}{method_label(method)}" for method in columns)],
        [
            [
                name,
                *(format_weight(weights.get(name, 0.0)) for weights in mixtures.values()),
                *(format_weight(column.printed[paper]) for column in columns.values()),
            ]
            for name, paper in names.items()
        ],
        [["sum", *map(format_weight, sums)]],
        notes,
    )


def _weights_here(
    folder: RunFolder, comparison: Comparison | None
) -> Iterable[tuple[str, Mapping[str, float]]]:
    if comparison is not None:
        return [(run.label, run.run.mixture if run.run else {}) for run in comparison.runs]
    if folder.base_runs:
        labels = run_labels(folder.base_runs, folder.base_runs)
        return [(labels[name], run.mixture) for name, run in folder.base_runs.items()]
    return [(name, mixture.weights) for name, mixture in folder.mixtures.items()]


def _cost_table(data_set: DataSet, folder: RunFolder) -> list[Table]:
    """The cost of each mixture of the folder, and the printed cost of its method."""
    flops, mixtures = data_set.flops(), ledger_of(folder).mixtures
    if not flops or not mixtures:
        return []

    def printed(method: str) -> list[str]:
        if method not in flops:
            return [MISSING, MISSING]
        hours = data_set.gpu_hours.get(method)
        shown = "0" if flops[method] == 0 else format_flops(flops[method])
        return [shown, MISSING if hours is None else f"{hours:g}"]

    rows, methods = [], set()
    for name, cost in mixtures.items():
        method = PAPER_METHODS.get(cost.mixture.method, cost.mixture.method)
        methods.add(method)
        rows.append([name, *cost.cells(), format_flops(cost.paper_flops), *printed(method)])
    rows += [
        [f"{method_label(method)} (not here)", *[MISSING] * 3, *printed(method)]
        for method in flops
        if method not in methods
    ]
    notes = [
        f"The paper is {source()}. It counts 6 FLOPs per parameter and token trained, 2 per token "
        "embedded, without attention scores and output layer. Its hours are of H100 GPUs; the "
        "others are of the devices that these runs held."
    ]
    if data_set.name == "pile":
        notes.append(
            "On the Pile the FLOPs are additional ones: Chameleon reuses its proxy from "
            "SlimPajama, the other methods train new ones."
        )
    if data_set.doge_step_ratio is not None:
        notes.append(
            f"A step of DoGE's proxy took about {data_set.doge_step_ratio:g} times the wall time "
            "of a plain one."
        )
    notes += [
        f"Training the base model of {size} took {hours:g} H100 hours."
        for size, hours in data_set.base_gpu_hours.items()
    ]
    header = ["mixture", "FLOPs", "device-hours", "FLOPs as the paper counts"]
    header += [f"{PAPER}FLOPs", f"{PAPER}H100 hours"]
    title = f"{TITLE}cost to obtain each mixture ({data_set.label})"
    return [Table.of(title, header, rows, notes=notes)]
