"""The table of results, and the report's tables of results on held-out text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from megatron_chameleon.artifacts import (
    EvaluationResult,
    TrainingRun,
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
from megatron_chameleon.report.significance import (
    NORMAL_95,
    SURE,
    loss_difference,
    mean_perplexity_difference,
    target_difference,
)
from megatron_chameleon.report.tables import (
    MISSING,
    Table,
    cells_of,
    counts_better,
    format_perplexity,
    formatted,
    four_decimals,
    unique_labels,
)
from megatron_chameleon.report.weights import Columns, weight_columns

# Fields of DomainLoss in the table of results.
MEASURES = (
    *("loss", "loss_error", "perplexity", "unigram_perplexity"),
    *("bits_per_byte", "bits_per_byte_error", "tokens", "text_bytes"),
)
HELD_OUT_NOTE = (
    "Domains marked held-out are never trained on. They are not in the averages and counts."
)


def results_table(
    results: Iterable[tuple[str, str, int | None, EvaluationResult]],
) -> pd.DataFrame:
    """Build the table of results: one row per evaluated run and domain.

    Args:
        results: mixture, run, seed and evaluation of each run.

    Returns:
        The columns mixture, run, seed, domain, held_out (whether the domain is held out from
        training), and ``MEASURES``, as floats.
    """
    table = pd.DataFrame(
        [
            {"mixture": mixture, "run": run, "seed": seed, "domain": name}
            | {"held_out": name in result.held_out}
            | {measure: getattr(loss, measure) for measure in MEASURES}
            for mixture, run, seed, result in results
            for name, loss in result.domains.items()
        ]
    )
    return table.astype(dict.fromkeys(MEASURES, float))


def by_domain(
    results: pd.DataFrame, measure: str, columns: str | list[str] = "run"
) -> pd.DataFrame:
    """Tabulate a measure by domain (rows, held-out domains last) and by ``columns``."""
    domains = results.sort_values("held_out", kind="stable")["domain"].unique()
    groups = results.groupby(columns, sort=False)
    found = pd.DataFrame({key: rows.set_index("domain")[measure] for key, rows in groups})
    return found.loc[domains]


def over_seeds(values: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return means and standard deviations by mixture, the first level of the columns."""
    mixtures = list(values.T.groupby(level=0, sort=False))
    means = pd.DataFrame({name: rows.mean(skipna=False) for name, rows in mixtures})
    return means, pd.DataFrame({name: rows.std(skipna=False) for name, rows in mixtures})


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the base run of the same name if the run folder has it."""

    name: str
    label: str
    result: EvaluationResult
    run: TrainingRun | None

    @property
    def seed(self) -> int | None:
        """The seed that the run's options record; None if unknown."""
        return None if self.run is None else self.run.provenance.options.get("seed")

    @property
    def stem(self) -> str:
        """The name without its seed: ``uniform`` for ``uniform-seed1``."""
        return re.sub(rf"-seed{self.seed}\b", "", self.name, count=1)

    def has_weights_of(self, other: Evaluated) -> bool:
        """Whether both runs were trained with the same weights."""
        if self.run is None or other.run is None:
            return False
        return same_weights(self.run.mixture, other.run.mixture)


@dataclasses.dataclass(frozen=True)
class ComparedRuns:
    """Runs evaluated under one protocol on one corpus; the baseline, if any, comes first."""

    runs: tuple[Evaluated, ...]
    baseline: Evaluated | None

    @functools.cached_property
    def groups(self) -> dict[str, list[Evaluated]]:
        """Label -> runs with the same weights whose names differ only in the seed.

        The baseline's group comes first. The standard deviation across seeds measures the noise of
        training; the standard error of a single run measures the sampling of the held-out text.
        """
        return seed_groups(self.runs)

    @functools.cached_property
    def results(self) -> pd.DataFrame:
        """The :func:`results_table` in the order of runs; mixtures are the labels of groups."""
        mixtures = {run.label: group for group, runs in self.groups.items() for run in runs}
        return results_table(
            (mixtures[run.label], run.label, run.seed, run.result) for run in self.runs
        )

    @property
    def others(self) -> tuple[Evaluated, ...]:
        """The runs that are compared with the baseline."""
        return self.runs if self.baseline is None else self.runs[1:]

    @property
    def domains(self) -> list[str]:
        """Names of the domains to train on, in the order of the corpus."""
        return list(self.runs[0].result.training_domains)

    @property
    def held_out(self) -> list[str]:
        """Names of the domains that the corpus holds out from training; not in the averages."""
        return self.runs[0].result.held_out

    @property
    def left_out(self) -> list[str]:
        """Names of the domains to train on without held-out text."""
        return list(dict.fromkeys(name for run in self.runs for name in run.result.left_out))

    @functools.cached_property
    def perplexity(self) -> pd.DataFrame:
        """Perplexity by domain to train on (rows) and label of the run (columns)."""
        return by_domain(self.results, "perplexity").loc[self.domains]

    def averages(self, group: str) -> pd.Series[float]:
        """Average perplexity of each run of a group, by seed."""
        rows = self.results[(self.results["mixture"] == group) & ~self.results["held_out"]]
        return rows.groupby("seed", dropna=False)["perplexity"].mean()

    def losses(self, group: str, domain: str) -> pd.Series[float]:
        """Loss on a domain of each run of a group, by seed."""
        rows = self.results[(self.results["mixture"] == group) & (self.results["domain"] == domain)]
        return rows.set_index("seed")["loss"]

    def counts_better(self, perplexity: pd.DataFrame) -> list[list[str]]:
        """Summary row: the number of domains in which each column is better than the first column.

        The list is empty if there is no baseline or only one column.
        """
        if self.baseline is None or len(perplexity.columns) < 2:
            return []
        first = perplexity.columns[0]
        return [[f"domains better than {first}", *counts_better(perplexity, first, min)]]

    def table(
        self,
        title: str,
        columns: Sequence[pd.DataFrame | pd.Series[str]],
        summary: Iterable[Sequence[str]] = (),
        notes: Iterable[str] = (),
    ) -> Table:
        """Build a table of formatted columns by domain; '-' for domains without held-out text."""
        texts = pd.concat(columns, axis=1).reindex([*self.domains, *self.left_out, *self.held_out])
        if self.held_out:
            texts.index = texts.index.map(self.runs[0].result.label)
            notes = [*notes, HELD_OUT_NOTE]
        return Table.by_row(title, "domain", texts, summary, notes)


def compare(folder: RunFolder, baseline: str | None = None) -> ComparedRuns:
    """Load the evaluated runs of ``folder``, the baseline first.

    Args:
        folder: run folder with at least one evaluation.
        baseline: name of an evaluated run; None takes the first run trained with uniform weights.

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
    require_same_evaluation(results)
    chosen = baseline or first_uniform(folder, results)
    labels = run_labels(folder.base_runs, results)
    names = sorted(results, key=lambda name: name != chosen)  # put the baseline first
    runs = tuple(Evaluated(n, labels[n], results[n], folder.base_runs.get(n)) for n in names)
    return ComparedRuns(runs, runs[0] if chosen is not None else None)


def require_same_evaluation(results: Mapping[str, EvaluationResult]) -> None:
    """Check that results, by name, have the same corpus, protocol and domains.

    Raises:
        UserError: if two differ; the message names both.
    """
    require_comparable(dict(results))
    first_name, first = next(iter(results.items()))
    for name, result in results.items():
        if different := set(first.domains) ^ set(result.domains):
            raise UserError(
                f"{EVALUATION}/{name}.json and {first_name}.json: only one file has the domain "
                f"'{min(different)}'; evaluate both on all domains, with the same --target"
            )


def caveats(folder: RunFolder, comparison: ComparedRuns) -> list[str]:
    """Describe the differences that make the runs less comparable, in one sentence each."""
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
        if name is not None and folder.mixtures[name].parameters.get("written") == "prior":
            found.append(
                f"The weights of {run.label} are those of its method's prior, since no gain over "
                "it was certain."
            )
        if name is not None and not same_weights(folder.mixtures[name].weights, trained.mixture):
            found.append(
                f"{folder.paths[f'{MIXTURE}/{name}']} has changed since {trained.root} was trained "
                "with it, so the mixture's intervals are not shown."
            )
    return found


def _named_after(folder: RunFolder, run_name: str, run: TrainingRun) -> str | None:
    """Find the mixture that a run is named after: the longest mixture name that matches.

    A mixture's name matches if it equals the run's name, or if the run's name starts with it and a
    hyphen. In merged folders, a mixture whose name ends with the suffix of a folder matches only
    the runs of that folder.
    """

    def split(name: str) -> tuple[str, Path | None]:
        for root, ending in folder.roots.items():
            if ending and name.endswith(f" ({ending})"):
                return name.removesuffix(f" ({ending})"), root
        return name, None

    found = []
    for mixture in folder.mixtures:
        stem, root = split(mixture)
        fits = f"{split(run_name)[0]}-".startswith(f"{stem}-")
        if fits and (root is None or run.root.is_relative_to(root)):
            found.append((len(stem), mixture))
    return max(found, default=(0, None))[1]


def seed_groups(runs: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    """Label -> runs of a method in the order of seeds, in the order of the first runs."""
    groups: list[list[Evaluated]] = []
    for run in runs:
        for group in groups:
            is_same = run.stem == group[0].stem and run.has_weights_of(group[0])
            if is_same and run.seed not in (None, *(each.seed for each in group)):
                group.append(run)
                break
        else:
            groups.append([run])
    first = {group[0].name: group[0] for group in groups}
    labels = run_labels({n: run.run for n, run in first.items() if run.run is not None}, first)
    for group in groups:
        name = group[0].name
        if len(group) == 1:
            labels[name] = group[0].label
        elif labels[name] == name:
            labels[name] = group[0].stem
    ordered = [sorted(group, key=lambda run: run.seed or 0) for group in groups]
    return dict(zip(unique_labels(labels).values(), ordered, strict=True))


def _described(averages: pd.Series[float]) -> str:
    """For example '20.12 ± 0.31 over 3 seeds', or '20.12' for one run."""
    seeds = f" over {len(averages)} seeds" if len(averages) > 1 else ""
    return cells_of([averages.mean()], format_perplexity, errors=[averages.std()])[0] + seeds


def findings(comparison: ComparedRuns) -> list[str]:
    """Describe each method's average perplexity in a sentence, compared with any baseline's.

    Methods with several seeds are compared by their mean over seeds.
    """
    averages = {group: comparison.averages(group) for group in comparison.groups}
    reference, *groups = averages
    if comparison.baseline is None or not groups:
        return [
            f"{group} has an average perplexity of {_described(found)}, over "
            f"{len(comparison.domains)} domains."
            for group, found in averages.items()
        ]
    found, base = [], averages[reference]
    perplexity = by_domain(comparison.results, "perplexity", ["mixture", "run"])
    means, _ = over_seeds(perplexity.loc[comparison.domains])
    for group in groups:
        ours, change = averages[group], []
        mean, theirs = ours.mean(), base.mean()
        if math.isfinite(mean) and math.isfinite(theirs):
            change.append(f"{mean / theirs - 1:+.1%}")
        if len(ours) == len(base) == 1:
            pair = (comparison.groups[name][0].result for name in (group, reference))
            error = mean_perplexity_difference(*pair).error
            change += [] if error is None else [f"{mean - theirs:+.2f} ± {error:.2f}"]
        else:
            gaps = (ours - base).dropna()
            if math.isfinite(gaps.std()):
                change.append(f"{gaps.mean():+.2f} ± {gaps.std():.2f} paired by {len(gaps)} seeds")
        changes = f" ({', '.join(change)})" if change else ""
        better = int((means[group] < means[reference]).sum())
        found.append(
            f"{group} has an average perplexity of {_described(ours)}, and {reference} has "
            f"{_described(base)}{changes}; {group} is lower in {better} of "
            f"{len(comparison.domains)} domains."
        )
    return found


def held_out_findings(comparison: ComparedRuns) -> list[str]:
    """Describe the loss on each held-out domain in a sentence for each method with a baseline.

    The difference is paired by document for single runs, and by seed for several seeds.
    """
    reference, *groups = comparison.groups
    if comparison.baseline is None:
        return []
    found = []
    for name, group in itertools.product(comparison.held_out, groups):
        ours, theirs = (comparison.losses(each, name) for each in (group, reference))
        gap, gaps = ours.mean() - theirs.mean(), (ours - theirs).dropna()
        if len(ours) == len(theirs) == 1:
            runs = (comparison.groups[each][0] for each in (group, reference))
            error = loss_difference(*(run.result.domains[name] for run in runs)).error
            source = "over documents"
        else:
            gap = gaps.mean() if len(gaps) else gap
            error, source = gaps.std() / math.sqrt(max(len(gaps), 1)), "over paired seeds"
        change = f"{gap:+.4f}"
        if error is not None and math.isfinite(error):
            change += f" ± {error:.4f}, standard error {source}"
        found.append(
            f"On {name}, which is held out, {group} has a loss of {ours.mean():.4f}, and "
            f"{reference} has {theirs.mean():.4f} ({change}; perplexity {math.expm1(gap):+.1%})."
        )
    return found


def target_table(comparison: ComparedRuns) -> Table | None:
    """Table by run: loss and perplexity of the target, and the paired difference to the baseline.

    The target is that of the first run that has one, the baseline if possible. Runs with another
    target have no figures. The result is None if no run has a target.
    """
    first = next((run for run in comparison.runs if run.result.target), None)
    if first is None:
        return None
    rows, baseline = [], comparison.baseline
    for run in comparison.runs:
        target, cells = run.result.target, [MISSING] * 4
        if target is not None and target_difference(run.result, first.result) is not None:
            cells[:1] = cells_of([target.loss], four_decimals, errors=[target.error])
            error = [target.perplexity_error]
            cells[1:2] = cells_of([target.perplexity], format_perplexity, errors=error)
        if baseline is not None and run is not baseline:
            gap = target_difference(run.result, baseline.result)
            if gap is not None:
                cells[2] = f"{gap.value:+.4f}"
            if gap is not None and gap.error is not None:
                ends = (gap.value + sign * NORMAL_95 * gap.error for sign in (-1, 1))
                cells[3] = " to ".join(f"{end:+.4f}" for end in ends)
        rows.append([run.label, *cells])
    header = ["run", "loss", "perplexity"]
    if baseline is not None and comparison.others:
        header += [f"loss minus {baseline.label}", "95% interval"]
    assert first.result.target is not None
    shares = first.result.target.shares.items()
    named = ", ".join(f"{first.result.label(name)} {share:.1%}" for name, share in shares)
    notes = [
        f"The target is {named}. Its loss is the sum of shares times losses, in nats per token, ± "
        "the standard error over documents. Differences are paired: both models predict the same "
        "tokens."
    ]
    return Table.of("Target", header, [row[: len(header)] for row in rows], notes=notes)


def perplexity_table(folder: RunFolder, comparison: ComparedRuns) -> Table:
    """Table of each domain's training weight, its interval, and every run's perplexity.

    The average over domains weights all domains equally, as in the paper's tables.
    """
    runs = comparison.runs
    # Show the distinct mixtures of the runs, but the baseline's only if there is no other run.
    mixed: list[Evaluated] = []
    for run in comparison.others or runs:
        if run.run is not None and not any(run.has_weights_of(other) for other in mixed):
            mixed.append(run)
    weights: Columns = {}
    for run in mixed:
        assert run.run is not None
        label = run.label if len(mixed) > 1 else ""
        trained = run.run.mixture
        same = [n for n, m in folder.mixtures.items() if same_weights(m.weights, trained)]
        own = _named_after(folder, run.name, run.run)
        name = own if own in same else next(iter(same), None)
        weights |= weight_columns(label, trained, None if name is None else folder.mixtures[name])
    unigram = by_domain(comparison.results, "unigram_perplexity").iloc[:, 0]
    found = by_domain(comparison.results, "perplexity")
    perplexities = formatted(found, format_perplexity, min)
    averages = cells_of([run.result.mean_perplexity for run in runs], format_perplexity, min)
    average = unigram[comparison.domains].mean()
    summary = [["average", format_perplexity(average), *averages]]
    summary += comparison.counts_better(comparison.perplexity)
    marked = "; the lowest of each row is marked" if len(runs) > 1 else ""
    notes = [f"On {runs[0].result.protocol.describe()}. Lower is better{marked}."]
    if comparison.left_out:
        empty = ", ".join(comparison.left_out)
        notes.append(f"Domains without held-out text, excluded from the average: {empty}.")
    columns = [
        pd.DataFrame(weights),
        unigram.map(format_perplexity).rename("unigram perplexity"),
        perplexities.add_prefix("perplexity "),
    ]
    return comparison.table("Held-out perplexity", columns, summary, notes)


def seed_table(comparison: ComparedRuns) -> Table | None:
    """Table of every method's mean perplexity over seeds, ± standard deviation, by domain.

    The result is None if no method has several seeds.
    """
    groups = comparison.groups
    if all(len(runs) == 1 for runs in groups.values()):
        return None
    found = by_domain(comparison.results, "perplexity", ["mixture", "run"])
    found.loc[""] = found.loc[comparison.domains].mean()  # the last row is the average
    means, deviations = over_seeds(found)
    texts = formatted(means, format_perplexity, min, deviations)
    summary = [
        ["average", *texts.iloc[-1]],
        *comparison.counts_better(means.loc[comparison.domains]),
    ]
    seeds = ", ".join(f"{group} {len(runs)}" for group, runs in groups.items())
    note = f"Means over seeds ± the standard deviation across seeds. Seeds: {seeds}."
    columns = [texts.add_prefix("perplexity ")]
    return comparison.table("Held-out perplexity over seeds", columns, summary, [note])


def loss_table(comparison: ComparedRuns) -> Table:
    """Table by domain: predicted tokens, every run's loss, and its difference to the baseline."""
    baseline, results = comparison.baseline, comparison.results
    tokens = by_domain(results, "tokens").iloc[:, 0].map("{:,.0f}".format)
    losses, errors = by_domain(results, "loss"), by_domain(results, "loss_error")
    columns: list[pd.DataFrame | pd.Series[str]] = [
        tokens.rename("tokens"),
        formatted(losses, four_decimals, errors=errors).add_prefix("loss "),
    ]
    notes = [
        "Losses are in nats per token, ± the standard error over documents. The error measures the "
        "sampling of the held-out text, not the variation between training runs."
    ]
    summary = []
    if baseline is not None and comparison.others:
        theirs = baseline.result.domains
        paired_errors = {
            run.label: [
                loss_difference(run.result.domains[name], theirs[name]).error
                for name in losses.index
            ]
            for run in comparison.others
        }
        errors = pd.DataFrame(paired_errors, losses.index, dtype=float)
        gaps = losses[errors.columns].sub(losses[baseline.label], axis=0)
        texts = formatted(gaps, "{:+.4f}".format, errors=errors)
        columns.append(texts.add_suffix(f" minus {baseline.label}"))
        counted = comparison.domains
        known = errors.loc[counted].notna().sum()
        for label, beyond in (
            ("significantly lower", gaps < -SURE * errors),
            ("significantly higher", gaps > SURE * errors),
        ):
            counts = zip(beyond.loc[counted].sum(), known, strict=True)
            summary.append([label, *(f"{n} of {k}" if k else MISSING for n, k in counts)])
        notes.append(
            f"Differences to {baseline.label} are paired: both models predict the same tokens. The "
            f"last rows count the differences beyond {SURE:g} standard errors."
        )
    return comparison.table("Held-out loss", columns, summary, notes)


def bits_per_byte_table(comparison: ComparedRuns) -> Table | None:
    """Table by domain: bytes of text and every run's bits per byte; None if no bytes are known."""
    results = comparison.results
    sizes = by_domain(results, "text_bytes").iloc[:, 0]
    if not sizes.fillna(0).any():
        return None
    values, errors = by_domain(results, "bits_per_byte"), by_domain(results, "bits_per_byte_error")
    texts = formatted(values, four_decimals, min, errors)
    size = sizes.map("{:,.0f}".format, na_action="ignore")
    note = (
        "Bits of loss per UTF-8 byte of the predicted text, comparable across tokenizers; ± the "
        "standard error over documents."
    )
    return comparison.table("Bits per byte", [size.rename("bytes of text"), texts], notes=[note])
