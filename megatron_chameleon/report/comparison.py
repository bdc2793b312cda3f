"""Compare evaluated runs: held-out perplexity, loss and bits per byte, also across seeds."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Sequence

import pandas as pd

from megatron_chameleon.artifacts import (
    DomainLoss,
    EvaluationResult,
    Mixture,
    TrainingRun,
    loss_difference,
    mean_perplexity_difference,
    require_comparable,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import (
    EVALUATION,
    RunFolder,
    first_uniform,
    require_one_corpus,
    run_labels,
    same_weights,
)
from megatron_chameleon.report.tables import (
    MISSING,
    Table,
    cells_of,
    format_perplexity,
    unique_labels,
)
from megatron_chameleon.report.weights import WeightColumns

# Loss differences beyond this many standard errors are unlikely to be due to the sampled documents.
SURE = 2.0
# Base runs are named METHOD-seed1 by examples/compare_methods.sh and the guides.
_SEED = re.compile(r"-seed(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation and the base run of the same name, where the run folder has it."""

    name: str
    label: str
    result: EvaluationResult
    run: TrainingRun | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Evaluated runs, the baseline first, all under one protocol on one corpus."""

    runs: tuple[Evaluated, ...]
    baseline: Evaluated | None

    @property
    def others(self) -> tuple[Evaluated, ...]:
        """The runs that are compared with the baseline."""
        return tuple(run for run in self.runs if run is not self.baseline)

    @property
    def domains(self) -> list[str]:
        """Domain names in the order of the corpus."""
        return list(self.runs[0].result.domains)

    @property
    def left_out(self) -> list[str]:
        """Names of the domains whose split has nothing to predict."""
        return list(dict.fromkeys(name for run in self.runs for name in run.result.left_out))

    @functools.cached_property
    def perplexity(self) -> pd.DataFrame:
        """Perplexity by domain (rows) and name of the run (columns)."""
        columns = {
            run.name: [run.result.domains[name].perplexity for name in self.domains]
            for run in self.runs
        }
        return pd.DataFrame(columns, index=self.domains)

    def domains_better(self, run: Evaluated) -> int:
        """Number of domains where the perplexity of ``run`` is below the baseline's."""
        assert self.baseline is not None
        return int((self.perplexity[run.name] < self.perplexity[self.baseline.name]).sum())


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of ``count`` figures, one per seed.

    ``deviation`` is None for a single figure and where a figure is infinite.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Of at least one figure."""
        known = len(figures) > 1 and all(map(math.isfinite, figures))
        deviation = statistics.stdev(figures) if known else None
        return cls(sum(figures) / len(figures), deviation, len(figures))

    def __str__(self) -> str:
        """For example '20.12 ± 0.31 over 3 seeds'."""
        figure = cells_of([self.mean], format_perplexity, errors=[self.deviation])[0]
        return f"{figure} over {self.count} seed{'s' if self.count > 1 else ''}"


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs with the same weights whose names differ by their seed only; or a single run.

    The standard deviation across them shows the noise of training, unlike the standard error of one
    run, which is that of another sample of held-out text.
    """

    label: str
    runs: tuple[Evaluated, ...]

    @property
    def perplexity(self) -> Spread:
        """Of the runs' average perplexities."""
        return Spread.of([run.result.mean_perplexity for run in self.runs])

    def perplexity_of(self, domain: str) -> Spread:
        """Of the runs' perplexities on one domain."""
        return Spread.of([run.result.domains[domain].perplexity for run in self.runs])

    def minus(self, other: SeedGroup) -> Spread | None:
        """Average perplexity minus that of ``other``, paired by seed; None without such a pair."""
        theirs = {seed_of(run.name): run.result.mean_perplexity for run in other.runs}
        differences = [
            run.result.mean_perplexity - theirs[seed]
            for run in self.runs
            if (seed := seed_of(run.name)) is not None and seed in theirs
        ]
        finite = [difference for difference in differences if math.isfinite(difference)]
        return Spread.of(finite) if finite else None

    def domains_better(self, other: SeedGroup) -> int:
        """Number of domains where the mean perplexity over seeds is below that of ``other``."""
        return sum(
            self.perplexity_of(name).mean < other.perplexity_of(name).mean
            for name in self.runs[0].result.domains
        )


def compare(folder: RunFolder, baseline: str | None = None) -> Comparison:
    """The evaluated runs of ``folder``.

    Args:
        folder: with at least one evaluation.
        baseline: name of an evaluated run; None takes the first one trained with uniform weights.

    Raises:
        UserError: if ``baseline`` has no evaluation, if evaluations differ in protocol or domains,
            or if ``folder`` holds an artifact of another corpus.
    """
    results = folder.evaluations
    if baseline is not None and baseline not in results:
        raise UserError(
            f"--baseline {baseline}: {folder.root / EVALUATION} has no {baseline}.json; "
            f"choose from {', '.join(results)}"
        )
    require_one_corpus([folder])
    require_comparable(results)
    (first_name, first), *others = results.items()
    if not first.domains:
        raise UserError(
            f"{EVALUATION}/{first_name}.json: field domains is empty; run the evaluation again"
        )
    for name, result in others:
        different = set(first.domains) ^ set(result.domains)
        if different:
            raise UserError(
                f"{EVALUATION}/{name}.json and {first_name}.json: only one of them has the domain "
                f"'{min(different)}'; evaluate both on all domains"
            )
    chosen = baseline or first_uniform(folder, results)
    labels = run_labels(folder.base_runs, results)
    names = sorted(results, key=lambda name: name != chosen)  # stable: the others stay sorted
    runs = tuple(Evaluated(n, labels[n], results[n], folder.base_runs.get(n)) for n in names)
    return Comparison(runs, runs[0] if chosen is not None else None)


def mixture_of(folder: RunFolder, evaluated: Evaluated) -> tuple[str, Mixture] | None:
    """Name and content of the file in 4-mixture with the weights that the run was trained with.

    Of several, the one that the run is named after is preferred.
    """
    if evaluated.run is None:
        return None
    weights = evaluated.run.mixture
    same = [(n, m) for n, m in folder.mixtures.items() if same_weights(m.weights, weights)]
    own = _named_after(folder, evaluated.name, evaluated.run)
    return min(same, key=lambda item: item[0] != own, default=None)


def _named_after(folder: RunFolder, name: str, run: TrainingRun) -> str | None:
    """The mixture that a run is named after: the longest name before the end or a hyphen.

    In merged folders, a mixture with a folder's suffix only fits the runs of that folder.
    """
    stem, _ = folder.split_name(name)
    found = {}
    for mixture in folder.mixtures:
        mixture_stem, root = folder.split_name(mixture)
        fits = stem == mixture_stem or stem.startswith(f"{mixture_stem}-")
        if fits and (root is None or run.root.is_relative_to(root)):
            found[mixture] = len(mixture_stem)
    return max(found, key=lambda mixture: found[mixture], default=None)


def caveats(folder: RunFolder, comparison: Comparison) -> list[str]:
    """Sentences on differences that limit the comparability of the runs."""
    found = []
    known = [(run.label, run.run) for run in comparison.runs if run.run is not None]
    aspects = {
        "evaluated at step": [(run.label, run.result.step) for run in comparison.runs],
        "parameters": [(label, run.parameters) for label, run in known],
        "training tokens": [(label, run.tokens) for label, run in known],
    }
    for aspect, values in aspects.items():
        if len({value for _, value in values}) > 1:
            each = ", ".join(f"{label} {value:,}" for label, value in values)
            found.append(f"The runs differ in '{aspect}': {each}.")
    unfinished = [f"{label} ({run.status})" for label, run in known if run.status != "finished"]
    if unfinished:
        found.append(f"Training has not finished: {', '.join(unfinished)}.")
    for evaluated in comparison.runs:
        run = evaluated.run
        if run is None or mixture_of(folder, evaluated) is not None:
            continue
        name = _named_after(folder, evaluated.name, run)
        if name is not None:
            found.append(
                f"{folder.place('mixtures', name)} has changed since {run.root} was trained with "
                "it: its intervals are not shown."
            )
    return found


def seed_of(name: str) -> int | None:
    """The seed in the name of a run; None if it has none."""
    found = _SEED.search(name)
    return None if found is None else int(found[1])


def seed_groups(comparison: Comparison) -> list[SeedGroup]:
    """The evaluated runs grouped by method, the baseline's group first."""
    groups: list[list[Evaluated]] = []
    for run in comparison.runs:
        group = next((each for each in groups if _differ_by_seed(run, each[0])), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    first = {group[0].name: group[0] for group in groups}
    methods = run_labels({n: run.run for n, run in first.items() if run.run is not None}, first)
    labels = {}
    for group in groups:
        name, label = group[0].name, group[0].label
        if len(group) > 1:
            label = methods[name] if methods[name] != name else _SEED.sub("", name, count=1)
        labels[name] = label
    return [
        SeedGroup(label, tuple(sorted(group, key=lambda run: seed_of(run.name) or 0)))
        for label, group in zip(unique_labels(labels).values(), groups, strict=True)
    ]


def _differ_by_seed(run: Evaluated, other: Evaluated) -> bool:
    stems = [_SEED.sub("-seed", each.name, count=1) for each in (run, other)]
    has_seed = seed_of(run.name) is not None
    return has_seed and stems[0] == stems[1] and _share_weights(run, other)


def _share_weights(run: Evaluated, other: Evaluated) -> bool:
    if run.run is None or other.run is None:
        return False
    return same_weights(run.run.mixture, other.run.mixture)


def findings(comparison: Comparison) -> list[str]:
    """A sentence per method: its average perplexity, compared with the baseline's if there is one.

    Methods with several seeds are compared by their mean over seeds.
    """
    groups = seed_groups(comparison)
    if comparison.baseline is not None and len(groups) > 1:
        return verdicts(comparison)
    over = f"over {len(comparison.domains)} domains"
    return [
        f"{group.label} has an average perplexity of {group.perplexity}, {over}; ± is the standard "
        "deviation across seeds."
        if len(group.runs) > 1
        else f"{group.label} has an average perplexity of "
        f"{format_perplexity(group.perplexity.mean)} {over}."
        for group in groups
    ]


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence per method that is compared with the baseline."""
    baseline, found = comparison.baseline, []
    if baseline is None:
        return []
    reference, *groups = seed_groups(comparison)
    for group in groups:
        spread, other, paired, note = group.perplexity, reference.perplexity, "", ""
        mean, theirs = spread.mean, other.mean
        if len(group.runs) == 1:
            (run,) = group.runs
            mean, theirs = run.result.mean_perplexity, baseline.result.mean_perplexity
            error = mean_perplexity_difference(run.result, baseline.result).error
            paired = "" if error is None else f"{mean - theirs:+.2f} ± {error:.2f}"
            again = ", trained with the same weights," if _share_weights(run, baseline) else ""
            averages = (
                f"{run.label}{again} has an average perplexity of {format_perplexity(mean)}, "
                f"{baseline.label} of {format_perplexity(theirs)}"
            )
            lower, better = run.label, comparison.domains_better(run)
        else:
            difference = group.minus(reference)
            if difference is not None and difference.deviation is not None:
                paired = (
                    f"{difference.mean:+.2f} ± {difference.deviation:.2f} paired by the "
                    f"{difference.count} seeds that both have"
                )
            averages = f"{group.label} has an average perplexity of {spread}, {reference.label} of "
            averages += str(other)
            lower, better = f"the mean of {group.label}", group.domains_better(reference)
            note = " ± is the standard deviation across seeds."
        change = ""
        if math.isfinite(mean) and math.isfinite(theirs):
            change = f" ({mean / theirs - 1:+.1%}{', ' if paired else ''}{paired})"
        found.append(
            f"{averages}{change}; {lower} is lower in {better} of "
            f"{len(comparison.domains)} domains.{note}"
        )
    return found


def perplexity_table(folder: RunFolder, comparison: Comparison) -> Table:
    """Per domain: training weight, its interval, and the held-out perplexity of every run.

    The average gives each domain the same weight, as in the paper's tables.
    """
    runs, baseline, domains = comparison.runs, comparison.baseline, comparison.domains
    weighted = _weight_columns(folder, comparison)
    header = [name for column in weighted for name in column.header()]
    blank = [""] * len(header)
    unigram = {name: loss.unigram_perplexity for name, loss in runs[0].result.domains.items()}

    def row(name: str, figures: Sequence[str]) -> list[str]:
        return [name, *(cell for column in weighted for cell in column.cells(name)), *figures]

    rows = [
        row(
            name,
            [
                format_perplexity(unigram[name]),
                *cells_of(comparison.perplexity.loc[name], format_perplexity, min),
            ],
        )
        for name in domains
    ]
    rows += [row(name, [MISSING] * (1 + len(runs))) for name in comparison.left_out]
    mean_unigram = math.fsum(unigram.values()) / len(unigram)
    averages = [run.result.mean_perplexity for run in runs]
    average_cells = cells_of(averages, format_perplexity, min)
    summary = [["average", *blank, format_perplexity(mean_unigram), *average_cells]]
    if baseline is not None and comparison.others:
        counts = [f"{comparison.domains_better(r)} of {len(domains)}" for r in comparison.others]
        label = f"domains better than {baseline.label}"
        summary.append([label, *blank, "", MISSING, *counts])
    marked = "; the lowest of each row is marked" if len(runs) > 1 else ""
    notes = [f"On {runs[0].result.protocol.describe()}. Lower is better{marked}."]
    if comparison.left_out:
        empty = ", ".join(comparison.left_out)
        notes.append(f"Nothing to predict, and not in the average: {empty}.")
    notes += [*caveats(folder, comparison), *verdicts(comparison)]
    columns = ["domain", *header, "unigram perplexity", *(f"perplexity {r.label}" for r in runs)]
    return Table.of("Held-out perplexity", columns, rows, summary, notes)


def _weight_columns(folder: RunFolder, comparison: Comparison) -> list[WeightColumns]:
    """The distinct mixtures of the runs; the baseline's only where there is no other run."""
    found: list[WeightColumns] = []
    for run in comparison.others or comparison.runs:
        if run.run is None or any(same_weights(run.run.mixture, c.weights) for c in found):
            continue
        file = mixture_of(folder, run)
        found.append(WeightColumns(run.label, run.run.mixture, file[1] if file else None))
    return [dataclasses.replace(found[0], label="")] if len(found) == 1 else found


def seed_table(comparison: Comparison) -> Table | None:
    """Per domain the mean over seeds of every method, ± their standard deviation.

    None where no method has several seeds.
    """
    groups = seed_groups(comparison)
    if all(len(group.runs) == 1 for group in groups):
        return None

    def row(name: str, domain: str | None) -> list[str]:
        found = [g.perplexity if domain is None else g.perplexity_of(domain) for g in groups]
        means, errors = [spread.mean for spread in found], [spread.deviation for spread in found]
        return [name, *cells_of(means, format_perplexity, min, errors)]

    rows = [row(name, name) for name in comparison.domains]
    rows += [[name, *[MISSING] * len(groups)] for name in comparison.left_out]
    summary = [row("average", None)]
    if comparison.baseline is not None and len(groups) > 1:
        reference, count = groups[0], len(comparison.domains)
        better = [f"{group.domains_better(reference)} of {count}" for group in groups[1:]]
        summary.append([f"domains better than {reference.label}", MISSING, *better])
    seeds = ", ".join(f"{group.label} {len(group.runs)}" for group in groups)
    return Table.of(
        "Held-out perplexity over seeds",
        ["domain", *(f"perplexity {group.label}" for group in groups)],
        rows,
        summary,
        [f"Means over seeds ± the standard deviation across seeds; seeds: {seeds}."],
    )


def loss_table(comparison: Comparison) -> Table:
    """Per domain: predicted tokens, the loss of every run, and the others' minus the baseline's."""
    runs, baseline = comparison.runs, comparison.baseline
    others = comparison.others if baseline else ()
    first = runs[0].result.domains
    differences = {
        run.name: [
            loss_difference(run.result.domains[name], baseline.result.domains[name])
            for name in comparison.domains
        ]
        for run in others
        if baseline is not None
    }
    rows = []
    for i, name in enumerate(comparison.domains):
        losses = [run.result.domains[name] for run in runs]
        means, errors = [each.loss for each in losses], [each.loss_error for each in losses]
        cells = cells_of(means, "{:.4f}".format, errors=errors)
        for found in differences.values():
            cells += cells_of([found[i].value], "{:+.4f}".format, errors=[found[i].error])
        rows.append([name, f"{first[name].tokens:,}", *cells])
    rows += [[name, *[MISSING] * (1 + len(runs) + len(others))] for name in comparison.left_out]
    summary = []
    for label, sign in (("surely lower", -1), ("surely higher", 1)) if others else ():
        known = [
            [sign * each.value > SURE * each.error for each in found if each.error is not None]
            for found in differences.values()
        ]
        counts = [f"{sum(each)} of {len(each)}" if each else MISSING for each in known]
        summary.append([label, *[""] * (1 + len(runs)), *counts])
    notes = [
        "Nats per token ± the standard error over documents: that of another sample of held-out "
        "text, not of another training run."
    ]
    label = baseline.label if baseline else ""
    if others:
        notes.append(
            f"Differences to {label} are paired: both models predict the same tokens. The last "
            f"rows count those beyond {SURE:g} standard errors."
        )
    header = ["domain", "tokens", *(f"loss {run.label}" for run in runs)]
    header += [f"{run.label} minus {label}" for run in others]
    return Table.of("Held-out loss", header, rows, summary, notes)


def bits_per_byte_table(comparison: Comparison) -> Table | None:
    """Per domain: bytes of text and bits per byte of every run; None where no bytes are known."""
    runs = comparison.runs
    first = runs[0].result.domains
    if not any(domain.text_bytes for domain in first.values()):
        return None

    def row(name: str, losses: list[DomainLoss]) -> list[str]:
        size = first[name].text_bytes
        bits = [each.bits_per_byte for each in losses]
        errors = [each.bits_per_byte_error for each in losses]
        cells = cells_of(bits, "{:.4f}".format, min, errors)
        return [name, MISSING if size is None else f"{size:,}", *cells]

    rows = [row(name, [run.result.domains[name] for run in runs]) for name in comparison.domains]
    rows += [[name, *[MISSING] * (1 + len(runs))] for name in comparison.left_out]
    return Table.of(
        "Bits per byte",
        ["domain", "bytes of text", *(run.label for run in runs)],
        rows,
        notes=[
            "Bits of loss per UTF-8 byte of the predicted text, comparable across tokenizers; ± "
            "the standard error over documents."
        ],
    )
