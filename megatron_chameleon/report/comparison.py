"""Which evaluated runs are compared, with which baseline, under which labels and mixtures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun, require_comparable
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.names import unique_labels
from megatron_chameleon.report.own_corpus import require_own_corpus
from megatron_chameleon.report.run_folder import EVALUATION, RunFolder

BASELINE_METHOD = "uniform"
# Any other method's runs go by their names.
METHOD_LABELS = {
    "uniform": "Uniform",
    "chameleon-pretrain": "Chameleon",
    "chameleon-finetune": "Chameleon (fine-tuning)",
}
# Beside a run with weights for fine-tuning, where "Chameleon" alone would be either.
LABEL_BESIDE_FINE_TUNING = {"chameleon-pretrain": "Chameleon (pretraining)"}
# Weights of a run and of the file it was given differ by rounding at most.
SAME_WEIGHT = 1e-9


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation with the base run of the same name, where that is in the run folder."""

    name: str
    label: str
    result: EvaluationResult
    run: TrainingRun | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Evaluated runs, the baseline first, all by one protocol on one corpus."""

    runs: tuple[Evaluated, ...]
    baseline: Evaluated | None

    @property
    def others(self) -> tuple[Evaluated, ...]:
        """The runs that are compared with the baseline."""
        return tuple(run for run in self.runs if run is not self.baseline)

    @property
    def domains(self) -> list[str]:
        """Names in the order of the first run's corpus."""
        return list(self.runs[0].result.domains)

    @property
    def left_out(self) -> list[str]:
        """Names of the domains whose split has nothing to predict."""
        return list(dict.fromkeys(name for run in self.runs for name in run.result.left_out))

    def domains_better(self, run: Evaluated) -> int:
        """In how many domains the perplexity of ``run`` is below the baseline's."""
        assert self.baseline is not None
        reference = self.baseline.result.domains
        return sum(
            domain.perplexity < reference[name].perplexity
            for name, domain in run.result.domains.items()
        )


def compare(folder: RunFolder, baseline: str | None = None) -> Comparison:
    """The evaluated runs of ``folder``.

    Args:
        folder: with at least one evaluation.
        baseline: name of an evaluated run; None takes the first that was trained with uniform
            weights, if there is one.

    Raises:
        UserError: if nothing was evaluated, if ``baseline`` was not, if the evaluations differ in
            corpus, protocol or domains, or if ``folder`` holds anything of another corpus.
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
    require_own_corpus(folder)
    require_comparable(results)
    _require_same_domains(results)
    chosen = baseline or _first_uniform(folder)
    labels = run_labels(folder.base_runs, results)
    names = sorted(results, key=lambda name: name != chosen)  # stable: the others stay sorted
    runs = tuple(
        Evaluated(name, labels[name], results[name], folder.base_runs.get(name)) for name in names
    )
    return Comparison(runs, runs[0] if chosen is not None else None)


def run_labels(runs: Mapping[str, TrainingRun], names: Iterable[str]) -> dict[str, str]:
    """Name -> what tables and legends call the run: its method if no other shown run has it.

    No two have the same label, and none has the name of another run, shown or not.
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


def mixture_of(folder: RunFolder, evaluated: Evaluated) -> tuple[str, Mixture] | None:
    """Name and content of the file in 4-mixture that has the weights of the run's training.

    Of several with the same weights, the one that the run is named after comes first.
    """
    run = evaluated.run
    if run is None:
        return None
    same = [
        (name, mixture)
        for name, mixture in folder.mixtures.items()
        if same_weights(mixture.weights, run.mixture)
    ]
    own = _named_after(folder, evaluated.name, run)
    same.sort(key=lambda item: item[0] != own)
    return same[0] if same else None


def same_weights(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Equal but for rounding, where a domain that is left out has weight 0."""
    return all(
        abs(first.get(name, 0.0) - second.get(name, 0.0)) <= SAME_WEIGHT
        for name in {*first, *second}
    )


def caveats(folder: RunFolder, comparison: Comparison) -> list[str]:
    """Sentences about what makes the runs less comparable than the table looks."""
    found = []
    known = [(run.label, run.run) for run in comparison.runs if run.run is not None]
    aspects = {
        "evaluated at step": [(run.label, run.result.step) for run in comparison.runs],
        "parameters": [(label, run.parameters) for label, run in known],
        "training tokens": [(label, run.tokens) for label, run in known],
    }
    for aspect, values in aspects.items():
        if len({value for _, value in values}) > 1:
            listed = ", ".join(f"{label} {value:,}" for label, value in values)
            found.append(f"The runs differ in '{aspect}': {listed}.")
    unfinished = [f"{label} ({run.status})" for label, run in known if run.status != "finished"]
    if unfinished:
        found.append(f"Training has not finished: {', '.join(unfinished)}.")
    return found + _changed_mixtures(folder, comparison)


def _changed_mixtures(folder: RunFolder, comparison: Comparison) -> list[str]:
    """Which runs are named after a mixture that has other weights by now."""
    found = []
    for run in comparison.runs:
        if run.run is None or mixture_of(folder, run) is not None:
            continue
        name = _named_after(folder, run.name, run.run)
        if name is not None:
            found.append(
                f"{folder.mixture_file(name)} has changed since {run.run.root} was trained with "
                "it: its intervals are left out."
            )
    return found


def _named_after(folder: RunFolder, name: str, run: TrainingRun) -> str | None:
    """The mixture that a run is named after: the longest name before the end or a hyphen.

    Of several folders put together, one that is called after a folder is for the runs in it alone.
    """
    stem, _ = folder.parted(name)
    found = {}
    for mixture in folder.mixtures:
        its_stem, root = folder.parted(mixture)
        fits = stem == its_stem or stem.startswith(f"{its_stem}-")
        if fits and (root is None or run.root.is_relative_to(root)):
            found[mixture] = len(its_stem)
    return max(found, key=lambda mixture: found[mixture], default=None)


def _first_uniform(folder: RunFolder) -> str | None:
    uniform = (
        name
        for name in folder.evaluations
        if name in folder.base_runs and folder.base_runs[name].mixture_method == BASELINE_METHOD
    )
    return next(uniform, None)


def _require_same_domains(results: Mapping[str, EvaluationResult]) -> None:
    (first_name, first), *others = results.items()
    if not first.domains:
        raise UserError(
            f"{EVALUATION}/{first_name}.json: field domains: there is none; evaluate again"
        )
    for name, result in others:
        different = set(first.domains) ^ set(result.domains)
        if different:
            raise UserError(
                f"{EVALUATION}/{name}.json and {first_name}.json: only one of them has the domain "
                f"'{min(different)}'; evaluate both on all domains"
            )
