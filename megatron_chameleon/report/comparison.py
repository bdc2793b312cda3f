"""Which evaluated runs are compared, with which baseline, and how far seeds spread."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from megatron_chameleon.artifacts import (
    EvaluationResult,
    Mixture,
    TrainingRun,
    mean_perplexity_difference,
    require_comparable,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import EVALUATION, RunFolder, require_one_corpus
from megatron_chameleon.report.tables import cells_of, format_perplexity, unique_labels

BASELINE_METHOD = "uniform"
# Runs of other methods are labelled by their names.
METHOD_LABELS = {
    "uniform": "Uniform",
    "chameleon-pretrain": "Chameleon",
    "chameleon-finetune": "Chameleon (fine-tuning)",
}
# Next to a run with weights for fine-tuning, where "Chameleon" would be ambiguous.
LABEL_BESIDE_FINE_TUNING = {"chameleon-pretrain": "Chameleon (pretraining)"}
# Weights of a run and of its mixture file differ by rounding at most.
SAME_WEIGHT = 1e-9
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
        return pd.DataFrame(
            {
                r.name: {d: loss.perplexity for d, loss in r.result.domains.items()}
                for r in self.runs
            },
            index=self.domains,
        )

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
        """As in tables of perplexity: '20.12 ± 0.31'."""
        return cells_of([self.mean], format_perplexity, errors=[self.deviation])[0]


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
        UserError: if there is no evaluation (of ``baseline``), if evaluations differ in protocol or
            domains, or if ``folder`` holds anything of another corpus.
    """
    results = folder.evaluations
    if not results:
        raise UserError(
            f"{folder.root / EVALUATION} holds no evaluation; "
            "run tools/evaluate.py perplexity for each base run first"
        )
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


def first_uniform(folder: RunFolder, names: Iterable[str]) -> str | None:
    """The first of ``names`` that is a base run with uniform weights."""
    runs = folder.base_runs
    uniform = (n for n in names if n in runs and runs[n].mixture_method == BASELINE_METHOD)
    return next(uniform, None)


def uniform_first(runs: Mapping[str, TrainingRun]) -> list[str]:
    """Names of ``runs``, uniform ones first, so that a run keeps its colour throughout."""
    return sorted(runs, key=lambda name: runs[name].mixture_method != BASELINE_METHOD)


def run_labels(runs: Mapping[str, TrainingRun], names: Iterable[str]) -> dict[str, str]:
    """Name -> label in tables and legends: the method if no other shown run has it, or the name.

    Labels are unique, and none is the name of another run.
    """
    names = list(names)
    methods = {name: runs[name].mixture_method for name in names if name in runs}
    count = Counter(methods.values())
    known = METHOD_LABELS | (LABEL_BESIDE_FINE_TUNING if count["chameleon-finetune"] else {})
    labels = {
        name: known[method]
        for name, method in methods.items()
        if method in known and count[method] == 1 and known[method] not in runs
    }
    return unique_labels({name: labels.get(name, name) for name in names})


def same_weights(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether weights are equal up to rounding; a missing domain has weight 0."""
    names = {*first, *second}
    return all(abs(first.get(n, 0.0) - second.get(n, 0.0)) <= SAME_WEIGHT for n in names)


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


def caveats(folder: RunFolder, comparison: Comparison) -> list[str]:
    """Sentences about what makes the runs less comparable than the table suggests."""
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
                f"{folder.mixture_file(name)} has changed since {run.root} was trained with it: "
                "its intervals are not shown."
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


def findings(comparison: Comparison) -> list[str]:
    """A sentence per method: its average perplexity, compared with the baseline's if there is one.

    Methods with several seeds are compared by their mean over seeds.
    """
    groups = seed_groups(comparison)
    if comparison.baseline is not None and len(groups) > 1:
        return verdicts(comparison)
    over = f"over {len(comparison.domains)} domains"
    return [
        f"{_average_phrase(group)}, {over}; ± is the standard deviation across seeds."
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
        mean, theirs, count = group.perplexity.mean, reference.perplexity.mean, ""
        if len(group.runs) == 1:
            (run,) = group.runs
            mean, theirs = run.result.mean_perplexity, baseline.result.mean_perplexity
            error = mean_perplexity_difference(run.result, baseline.result).error
            paired = "" if error is None else f"{mean - theirs:+.2f} ± {error:.2f}"
            again = ", trained with the same weights," if _share_weights(run, baseline) else ""
            average = f"{run.label}{again} has an average perplexity of {format_perplexity(mean)}"
            other = f"{baseline.label} of {format_perplexity(theirs)}"
            lower, better = run.label, comparison.domains_better(run)
        else:
            difference, paired = group.minus(reference), ""
            if difference is not None and difference.deviation is not None:
                paired = (
                    f"{difference.mean:+.2f} ± {difference.deviation:.2f} paired by the "
                    f"{difference.count} seeds that both have"
                )
            average = _average_phrase(group)
            other = f"{reference.label} of {_over_seeds(reference.perplexity)}"
            lower, better = f"the mean of {group.label}", group.domains_better(reference)
            count = " ± is the standard deviation across seeds."
        change = ""
        if math.isfinite(mean) and math.isfinite(theirs):
            change = f" ({mean / theirs - 1:+.1%}{', ' if paired else ''}{paired})"
        found.append(
            f"{average}, {other}{change}; {lower} is lower in {better} of "
            f"{len(comparison.domains)} domains.{count}"
        )
    return found


def _average_phrase(group: SeedGroup) -> str:
    return f"{group.label} has an average perplexity of {_over_seeds(group.perplexity)}"


def _over_seeds(found: Spread) -> str:
    """For example '20.12 ± 0.31 over 3 seeds'."""
    return f"{found} over {found.count} seed{'s' if found.count > 1 else ''}"


def _share_weights(run: Evaluated, other: Evaluated) -> bool:
    if run.run is None or other.run is None:
        return False
    return same_weights(run.run.mixture, other.run.mixture)


def _differ_by_seed(run: Evaluated, other: Evaluated) -> bool:
    stems = [_SEED.sub("-seed", each.name, count=1) for each in (run, other)]
    has_seed = seed_of(run.name) is not None
    return has_seed and stems[0] == stems[1] and _share_weights(run, other)


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
