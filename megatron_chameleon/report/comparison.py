"""Compare evaluated runs: held-out perplexity, loss and bits per byte, also across seeds."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

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
    MIXTURE,
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
from megatron_chameleon.report.weights import rows_by_domain, weight_columns

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

    @property
    def seed(self) -> int | None:
        """The seed in the name; None if it has none."""
        found = _SEED.search(self.name)
        return None if found is None else int(found[1])

    def has_weights_of(self, other: Evaluated) -> bool:
        """Whether both were trained with the same weights."""
        if self.run is None or other.run is None:
            return False
        return same_weights(self.run.mixture, other.run.mixture)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Evaluated runs, the baseline first, all under one protocol on one corpus."""

    runs: tuple[Evaluated, ...]
    baseline: Evaluated | None

    @property
    def others(self) -> tuple[Evaluated, ...]:
        """The runs that are compared with the baseline."""
        return self.runs if self.baseline is None else self.runs[1:]

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

    def domains_better(self, runs: Sequence[Evaluated], than: Sequence[Evaluated]) -> int:
        """Number of domains where the mean perplexity of ``runs`` is below that of ``than``."""
        ours, theirs = (
            self.perplexity[[r.name for r in each]].mean(axis=1) for each in (runs, than)
        )
        return int((ours < theirs).sum())

    def table(
        self,
        title: str,
        header: Iterable[str],
        row: Callable[[str], Sequence[str]],
        summary: Iterable[Sequence[str]] = (),
        notes: Iterable[str] = (),
    ) -> Table:
        """A table of ``row`` of each domain; figures of a domain left out are '-'."""
        names = ["domain", *header]
        dashes = [[name, *[MISSING] * (len(names) - 1)] for name in self.left_out]
        rows = [[name, *row(name)] for name in self.domains]
        return Table.of(title, names, rows + dashes, summary, notes)


def spread_of(figures: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; NaN for a single figure or where one is infinite."""
    known = len(figures) > 1 and all(map(math.isfinite, figures))
    return sum(figures) / len(figures), statistics.stdev(figures) if known else math.nan


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs with the same weights whose names differ by their seed only; or a single run.

    The standard deviation across them shows the noise of training, unlike the standard error of one
    run, which is that of another sample of held-out text.
    """

    label: str
    runs: tuple[Evaluated, ...]

    @property
    def averages(self) -> list[float]:
        """Average perplexity of each run."""
        return [run.result.mean_perplexity for run in self.runs]

    def __str__(self) -> str:
        """For example '20.12 ± 0.31 over 3 seeds', or '20.12' for one run."""
        mean, deviation = spread_of(self.averages)
        seeds = f" over {len(self.runs)} seeds" if len(self.runs) > 1 else ""
        return cells_of([mean], format_perplexity, errors=[deviation])[0] + seeds


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


def mixture_of(folder: RunFolder, evaluated: Evaluated) -> Mixture | None:
    """The file in 4-mixture with the weights that the run was trained with.

    Of several, the one that the run is named after is preferred.
    """
    if evaluated.run is None:
        return None
    weights = evaluated.run.mixture
    same = [name for name, m in folder.mixtures.items() if same_weights(m.weights, weights)]
    own = _named_after(folder, evaluated.name, evaluated.run)
    return folder.mixtures[min(same, key=lambda name: name != own)] if same else None


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
    known = [(run, run.run) for run in comparison.runs if run.run is not None]
    aspects = {
        "evaluated at step": [(run.label, run.result.step) for run in comparison.runs],
        "parameters": [(run.label, trained.parameters) for run, trained in known],
        "training tokens": [(run.label, trained.tokens) for run, trained in known],
    }
    for aspect, values in aspects.items():
        if len({value for _, value in values}) > 1:
            each = ", ".join(f"{label} {value:,}" for label, value in values)
            found.append(f"The runs differ in '{aspect}': {each}.")
    unfinished = [f"{r.label} ({t.status})" for r, t in known if t.status != "finished"]
    if unfinished:
        found.append(f"Training has not finished: {', '.join(unfinished)}.")
    for run, trained in known:
        name = _named_after(folder, run.name, trained)
        if name is not None and mixture_of(folder, run) is None:
            found.append(
                f"{folder.paths[f'{MIXTURE}/{name}']} has changed since {trained.root} was trained "
                "with it: its intervals are not shown."
            )
    return found


def seed_groups(comparison: Comparison) -> list[SeedGroup]:
    """The evaluated runs grouped by method, the baseline's group first."""
    groups: list[list[Evaluated]] = []
    for run in comparison.runs:
        for group in groups:
            stems = {_SEED.sub("-seed", each.name, count=1) for each in (run, group[0])}
            if run.seed is not None and len(stems) == 1 and run.has_weights_of(group[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    first = {group[0].name: group[0] for group in groups}
    methods = run_labels({n: run.run for n, run in first.items() if run.run is not None}, first)
    labels = {}
    for group in groups:
        name, label = group[0].name, group[0].label
        if len(group) > 1:
            label = methods[name] if methods[name] != name else _SEED.sub("", name, count=1)
        labels[name] = label
    return [
        SeedGroup(label, tuple(sorted(group, key=lambda run: run.seed or 0)))
        for label, group in zip(unique_labels(labels).values(), groups, strict=True)
    ]


def findings(comparison: Comparison) -> list[str]:
    """A sentence per method: its average perplexity, compared with the baseline's if there is one.

    Methods with several seeds are compared by their mean over seeds.
    """
    reference, *groups = seed_groups(comparison)
    if comparison.baseline is None or not groups:
        return [
            f"{group.label} has an average perplexity of {group}, over {len(comparison.domains)} "
            "domains."
            for group in (reference, *groups)
        ]
    by_seed, found = {run.seed: run for run in reference.runs}, []
    for group in groups:
        mean, theirs = (spread_of(each.averages)[0] for each in (group, reference))
        change = []
        if math.isfinite(mean) and math.isfinite(theirs):
            change.append(f"{mean / theirs - 1:+.1%}")
        if len(group.runs) == len(reference.runs) == 1:
            error = mean_perplexity_difference(group.runs[0].result, reference.runs[0].result).error
            change += [] if error is None else [f"{mean - theirs:+.2f} ± {error:.2f}"]
        else:
            pairs = [(run, by_seed[run.seed]) for run in group.runs if run.seed in by_seed]
            gaps = [a.result.mean_perplexity - b.result.mean_perplexity for a, b in pairs]
            gap, deviation = spread_of(gaps or [math.nan])
            if not math.isnan(deviation):
                change.append(f"{gap:+.2f} ± {deviation:.2f} paired by {len(pairs)} seeds")
        changes = f" ({', '.join(change)})" if change else ""
        better = comparison.domains_better(group.runs, reference.runs)
        found.append(
            f"{group.label} has an average perplexity of {group}, {reference.label} of {reference}"
            f"{changes}; {group.label} is lower in {better} of {len(comparison.domains)} domains."
        )
    return found


def perplexity_table(folder: RunFolder, comparison: Comparison) -> Table:
    """Per domain: training weight, its interval, and the held-out perplexity of every run.

    The average gives each domain the same weight, as in the paper's tables.
    """
    runs, baseline, domains = comparison.runs, comparison.baseline, comparison.domains
    # The distinct mixtures of the runs; the baseline's only where there is no other run.
    mixed: list[Evaluated] = []
    for run in comparison.others or runs:
        if run.run is not None and not any(run.has_weights_of(other) for other in mixed):
            mixed.append(run)
    columns: dict[str, dict[str, str]] = {}
    for run in mixed:
        assert run.run is not None
        label = run.label if len(mixed) > 1 else ""
        columns |= weight_columns(label, run.run.mixture, mixture_of(folder, run))
    unigram = {name: loss.unigram_perplexity for name, loss in runs[0].result.domains.items()}
    weights = {
        name: texts for name, *texts in rows_by_domain([*domains, *comparison.left_out], columns)
    }
    rows = [
        [
            name,
            *weights[name],
            format_perplexity(unigram[name]),
            *cells_of(comparison.perplexity.loc[name], format_perplexity, min),
        ]
        for name in domains
    ]
    rows += [[name, *weights[name], *[MISSING] * (1 + len(runs))] for name in comparison.left_out]
    blank, averages = [""] * len(columns), [run.result.mean_perplexity for run in runs]
    mean_unigram = format_perplexity(math.fsum(unigram.values()) / len(unigram))
    summary = [["average", *blank, mean_unigram, *cells_of(averages, format_perplexity, min)]]
    if baseline is not None and comparison.others:
        better = [comparison.domains_better([run], [baseline]) for run in comparison.others]
        counts = [f"{count} of {len(domains)}" for count in better]
        label = f"domains better than {baseline.label}"
        summary.append([label, *blank, "", MISSING, *counts])
    marked = "; the lowest of each row is marked" if len(runs) > 1 else ""
    notes = [f"On {runs[0].result.protocol.describe()}. Lower is better{marked}."]
    if comparison.left_out:
        empty = ", ".join(comparison.left_out)
        notes.append(f"Nothing to predict, and not in the average: {empty}.")
    header = ["domain", *columns, "unigram perplexity", *(f"perplexity {r.label}" for r in runs)]
    return Table.of("Held-out perplexity", header, rows, summary, notes)


def seed_table(comparison: Comparison) -> Table | None:
    """Per domain the mean over seeds of every method, ± their standard deviation.

    None where no method has several seeds.
    """
    groups = seed_groups(comparison)
    if all(len(group.runs) == 1 for group in groups):
        return None

    def cells(figures: Iterable[Sequence[float]]) -> list[str]:
        means, deviations = zip(*map(spread_of, figures), strict=True)
        return cells_of(means, format_perplexity, min, deviations)

    def row(name: str) -> list[str]:
        return cells(comparison.perplexity.loc[name, [r.name for r in g.runs]] for g in groups)

    summary = [["average", *cells(group.averages for group in groups)]]
    if comparison.baseline is not None and len(groups) > 1:
        reference = groups[0]
        better = [comparison.domains_better(group.runs, reference.runs) for group in groups[1:]]
        counts = [f"{count} of {len(comparison.domains)}" for count in better]
        summary.append([f"domains better than {reference.label}", MISSING, *counts])
    seeds = ", ".join(f"{group.label} {len(group.runs)}" for group in groups)
    note = f"Means over seeds ± the standard deviation across seeds; seeds: {seeds}."
    header = [f"perplexity {group.label}" for group in groups]
    return comparison.table("Held-out perplexity over seeds", header, row, summary, [note])


def loss_table(comparison: Comparison) -> Table:
    """Per domain: predicted tokens, the loss of every run, and the others' minus the baseline's."""
    runs, baseline = comparison.runs, comparison.baseline
    others = comparison.others if baseline else ()
    # [others][k]
    differences = [
        [
            loss_difference(run.result.domains[name], baseline.result.domains[name])
            for name in comparison.domains
        ]
        for run in others
        if baseline is not None
    ]

    def row(name: str) -> list[str]:
        losses = [run.result.domains[name] for run in runs]
        errors = [each.loss_error for each in losses]
        cells = cells_of([each.loss for each in losses], "{:.4f}".format, errors=errors)
        gaps = [found[comparison.domains.index(name)] for found in differences]
        errors = [gap.error for gap in gaps]
        cells += cells_of([gap.value for gap in gaps], "{:+.4f}".format, errors=errors)
        return [f"{losses[0].tokens:,}", *cells]

    summary = []
    for label, sign in (("surely lower", -1), ("surely higher", 1)) if others else ():
        known = [
            [sign * each.value > SURE * each.error for each in found if each.error is not None]
            for found in differences
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
    header = ["tokens", *(f"loss {run.label}" for run in runs)]
    header += [f"{run.label} minus {label}" for run in others]
    return comparison.table("Held-out loss", header, row, summary, notes)


def bits_per_byte_table(comparison: Comparison) -> Table | None:
    """Per domain: bytes of text and bits per byte of every run; None where no bytes are known."""
    runs = comparison.runs
    if not any(domain.text_bytes for domain in runs[0].result.domains.values()):
        return None

    def row(name: str) -> list[str]:
        losses: list[DomainLoss] = [run.result.domains[name] for run in runs]
        size, errors = losses[0].text_bytes, [each.bits_per_byte_error for each in losses]
        cells = cells_of([each.bits_per_byte for each in losses], "{:.4f}".format, min, errors)
        return [MISSING if size is None else f"{size:,}", *cells]

    note = (
        "Bits of loss per UTF-8 byte of the predicted text, comparable across tokenizers; ± the "
        "standard error over documents."
    )
    header = ["bytes of text", *(run.label for run in runs)]
    return comparison.table("Bits per byte", header, row, notes=[note])
