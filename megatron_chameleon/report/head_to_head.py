"""What a head-to-head of methods compares: mixtures, and base models trained by them, by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import (
    Cost,
    EvaluationResult,
    Mixture,
    TrainingRun,
    require_comparable,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import same_weights
from megatron_chameleon.report.head_to_head_statistics import (
    Array,
    Difference,
    Spread,
    difference,
    spread,
)
from megatron_chameleon.report.ledger import Ledger, MixtureCost, ledger_of
from megatron_chameleon.report.run_folder import BASE, EVALUATION, MIXTURE, RunFolder

HOW = "examples/compare_methods.sh goes on with what is missing"
LABELS = {
    "uniform": "Uniform",
    "natural": "Natural",
    "unimax": "UniMax",
    "chameleon": "Chameleon",
    "doremi": "DoReMi",
    "doge": "DoGE",
    "regmix": "RegMix",
    "mixing-laws": "Mixing laws",
}
LEAST_SEEDS = 3
# Options of a base run that may differ between those that are compared: where it is, what is
# compared, and what changes no result.
MAY_DIFFER = {"run_dir", "mixture", "seed", "micro_batch_size", "compile_layers", "parallel"}
MAY_DIFFER |= {"dry_first_step", "log_interval", "save_interval", "overwrite", "checkpointing"}
MAY_DIFFER |= {"stopping", "validation", "logging", "profiling"}


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is compared: mixtures by the names of their files, and the seeds of the base models.

    A base run is called after its mixture, then ``run_suffix``, then ``-seedN``.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    run_suffix: str = ""
    baseline: str = "uniform"
    reference: str = "chameleon"

    def check(self) -> None:
        """Raises UserError for too few or repeated names or seeds, or without the baseline."""
        for flag, values, least in (
            ("--mixtures", self.names, 2),
            ("--seeds", self.seeds, LEAST_SEEDS),
        ):
            given = " ".join(map(str, values))
            if len(set(values)) < len(values) or len(values) < least:
                raise UserError(f"{flag} {given}: give at least {least}, none of them twice")
        if self.baseline not in self.names:
            raise UserError(
                f"--baseline {self.baseline} is not among --mixtures {' '.join(self.names)}; "
                "add it, or name another one"
            )

    def run_name(self, mixture: str, seed: int) -> str:
        """Of the base run, and of its evaluation."""
        return f"{mixture}{self.run_suffix}-seed{seed}"


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A mixture, what it took, and what was measured of its base models, seed by seed.

    Attributes:
        cost: of the mixture and of all that was made for it.
        made_of: what that cost is the sum of.
        twin_of: label of an earlier mixture with the same weights, whose models these are.
    """

    name: str
    label: str
    mixture: Mixture
    cost: Cost
    made_of: tuple[str, ...]
    runs: tuple[TrainingRun, ...]
    results: tuple[EvaluationResult, ...]
    twin_of: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class HeadToHead:
    """All that is compared, m mixtures with s seeds on k domains.

    Attributes:
        perplexities: [m, s, k], in the order of ``contestants``, the seeds and ``domains``.
    """

    selection: Selection
    contestants: tuple[Contestant, ...]
    domains: tuple[str, ...]
    perplexities: Array

    def __iter__(self) -> Iterator[Contestant]:
        return iter(self.contestants)

    @property
    def averages(self) -> Array:
        """[m, s]: the average over domains, each counting the same, as in the paper's tables."""
        averages: Array = self.perplexities.mean(axis=2)
        return averages

    @property
    def baseline(self) -> Contestant:
        """What the others are compared with."""
        return self.contestants[self.selection.names.index(self.selection.baseline)]

    @property
    def reference(self) -> Contestant | None:
        """What the others' costs are set in relation to, if it takes part."""
        known = {contestant.name: contestant for contestant in self.contestants}
        return known.get(self.selection.reference)

    @property
    def spread(self) -> Spread:
        """Between mixtures and between seeds, over models that are not the same."""
        own = [i for i, contestant in enumerate(self.contestants) if contestant.twin_of is None]
        return spread(self.averages[own])

    def difference(self, ours: Contestant, theirs: Contestant) -> Difference:
        """The paired difference of two average perplexities."""
        position = self.contestants.index
        return difference(self.averages[position(ours)], self.averages[position(theirs)])

    def domains_better(self, contestant: Contestant) -> int:
        """In how many domains the perplexity, averaged over seeds, is below the baseline's."""
        by_domain = self.perplexities.mean(axis=1)
        ours = by_domain[self.contestants.index(contestant)]
        return int((ours < by_domain[self.contestants.index(self.baseline)]).sum())


def head_to_head(folder: RunFolder, selection: Selection) -> HeadToHead:
    """Read what ``selection`` names from ``folder``.

    Raises:
        UserError: if something is missing or unfinished, or if what is there cannot be compared.
    """
    selection.check()
    ledger = ledger_of(folder)
    found: list[Contestant] = []
    for name in selection.names:
        found.append(_contestant(folder, ledger, selection, name, found))
    results = {
        f"{EVALUATION}/{selection.run_name(c.name, seed)}.json": result
        for c in found
        for seed, result in zip(selection.seeds, c.results, strict=True)
    }
    require_comparable(results)
    require_same_settings([run for c in found for run in c.runs])
    domains = tuple(found[0].results[0].domains)
    for path, result in results.items():
        if set(result.domains) != set(domains):
            raise UserError(f"{path} has other domains than the first one; {HOW}")
    perplexities = np.array(
        [[[r.domains[d].perplexity for d in domains] for r in c.results] for c in found]
    )
    return HeadToHead(selection, tuple(found), domains, perplexities)


def label_of(name: str) -> str:
    """What a table calls the mixture ``name``; doremi-2k is "DoReMi 2k"."""
    for known in (name, name.rpartition("-")[0]):
        if known in LABELS:
            return f"{LABELS[known]} {name.removeprefix(known).removeprefix('-')}".strip()
    return name


def _contestant(
    folder: RunFolder,
    ledger: Ledger,
    selection: Selection,
    name: str,
    earlier: list[Contestant],
) -> Contestant:
    path = f"{folder.root / MIXTURE / name}.json"
    if name not in folder.mixtures:
        raise UserError(f"{path} is not there; {HOW}")
    mixture, paid = folder.mixtures[name], ledger.mixtures[name]
    _require_whole_cost(paid, path)
    names = [selection.run_name(name, seed) for seed in selection.seeds]
    twin = _twin(mixture, earlier)
    if twin is not None and not all(n in folder.base_runs for n in names):
        names = [selection.run_name(twin.name, seed) for seed in selection.seeds]
    else:
        twin = None
    runs = tuple(_finished(folder, n) for n in names)
    for n, run, seed in zip(names, runs, selection.seeds, strict=True):
        _require_drawn_by(mixture, path, n, run, seed)
    return Contestant(
        name=name,
        label=label_of(name),
        mixture=mixture,
        cost=paid.cost,
        made_of=tuple(paid.parts),
        runs=runs,
        results=tuple(_evaluated(folder, n, run) for n, run in zip(names, runs, strict=True)),
        twin_of=None if twin is None else twin.label,
    )


def _require_whole_cost(paid: MixtureCost, path: str) -> None:
    if paid.missing and "total_cost" not in paid.mixture.parameters:
        raise UserError(
            f"what {path} took is not known: it was made from {paid.missing[0]}; delete it, "
            f"and {HOW}"
        )


def _twin(mixture: Mixture, earlier: Iterable[Contestant]) -> Contestant | None:
    """The first of ``earlier`` with the same weights and models of its own."""
    same = (c for c in earlier if same_weights(c.mixture.weights, mixture.weights))
    return next((c for c in same if c.twin_of is None), None)


def _finished(folder: RunFolder, name: str) -> TrainingRun:
    run = folder.base_runs.get(name)
    if run is None or run.status != "finished":
        what = "is not there" if run is None else f"is {run.status}"
        raise UserError(f"{folder.root / BASE / name} {what}; {HOW}")
    return run


def _evaluated(folder: RunFolder, name: str, run: TrainingRun) -> EvaluationResult:
    result = folder.evaluations.get(name)
    path = folder.root / EVALUATION / f"{name}.json"
    if result is None:
        raise UserError(f"{path} is not there; {HOW}")
    if result.step != run.step:
        raise UserError(
            f"{path} is of step {result.step}, the run has {run.step}; delete it, and {HOW}"
        )
    return result


def _require_drawn_by(mixture: Mixture, path: str, name: str, run: TrainingRun, seed: int) -> None:
    if not same_weights(run.mixture, mixture.weights):
        raise UserError(
            f"{path} has changed since {BASE}/{name} was trained with it; delete that run and its "
            f"evaluation, and {HOW}"
        )
    trained_with = run.provenance.options.get("seed")
    if trained_with != seed:
        raise UserError(
            f"{BASE}/{name} was trained with --seed {trained_with}, which its name does not say; "
            f"delete it, and {HOW}"
        )


def require_same_settings(runs: Iterable[TrainingRun]) -> None:
    """Base models that are compared differ in their mixture and seed alone.

    Raises:
        UserError: naming two that do not, and the option.
    """
    first, *others = runs
    for run in others:
        one, other = (_that_matter(r.provenance.options) for r in (first, run))
        different = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        if different:
            raise UserError(
                f"{run.root} and {first.root} differ in the option {different[0]} "
                f"({other.get(different[0])} and {one.get(different[0])}); compare runs that "
                "differ in their mixture and seed alone"
            )


def _that_matter(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in MAY_DIFFER}
