"""What a head-to-head of methods compares: mixtures, and base models trained by them, by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
from megatron_chameleon.report.head_to_head.runs import (
    HOW,
    evaluation_of,
    finished_run,
    require_drawn_by,
    require_same_settings,
)
from megatron_chameleon.report.head_to_head.statistics import (
    Array,
    Difference,
    Spread,
    difference,
    spread,
)
from megatron_chameleon.report.ledger import Ledger, MixtureCost, ledger_of
from megatron_chameleon.report.run_folder import EVALUATION, MIXTURE, RunFolder

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
UNITS = ("flops", "device_seconds")
SCRIPT = "examples/compare_methods.sh"
REFERENCE = "chameleon"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is compared: mixtures by the names of their files, and the seeds of the base models.

    A base run is called after its mixture, then ``run_suffix``, then ``-seedN``. Without a
    ``reference``, costs are set in relation to Chameleon's where it takes part.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    run_suffix: str = ""
    baseline: str = "uniform"
    reference: str | None = None

    def check(self) -> None:
        """Raises UserError for too few or repeated names or seeds, or names that take no part."""
        for flag, values, least in (
            ("--mixtures", self.names, 2),
            ("--seeds", self.seeds, LEAST_SEEDS),
        ):
            given = " ".join(map(str, values))
            if len(set(values)) < len(values) or len(values) < least:
                raise UserError(f"{flag} {given}: give at least {least}, none of them twice")
        for flag, name in (("--baseline", self.baseline), ("--reference", self.reference)):
            if name is not None and name not in self.names:
                raise UserError(
                    f"{flag} {name} is not among --mixtures {' '.join(self.names)}; add it, or "
                    f"name another one ({flag[2:].upper()}=NAME of {SCRIPT})"
                )

    def run_name(self, mixture: str, seed: int) -> str:
        """Of the base run, and of its evaluation."""
        return f"{mixture}{self.run_suffix}-seed{seed}"

    def run_names(self, mixture: str) -> list[str]:
        """Of the base runs of a mixture, in the order of the seeds."""
        return [self.run_name(mixture, seed) for seed in self.seeds]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A mixture, what it took, and what was measured of its base models, seed by seed.

    Attributes:
        paid: what the mixture and all that was made for it took, and what of that is unknown.
        twin_of: label of a mixture with the same weights, whose models these are.
    """

    name: str
    label: str
    mixture: Mixture
    paid: MixtureCost
    runs: tuple[TrainingRun, ...]
    results: tuple[EvaluationResult, ...]
    twin_of: str | None = None

    @property
    def models(self) -> str:
        """Label of the mixture whose models these are; its own, or its twin's."""
        return self.twin_of or self.label

    @property
    def cost(self) -> Cost | None:
        """Of the mixture and of all that was made for it; None where that is not known in full."""
        return self.paid.cost if self.paid.is_known else None

    @property
    def amounts(self) -> dict[str, float | None]:
        """FLOPs and device-seconds of the cost, by their names."""
        return {unit: None if self.cost is None else getattr(self.cost, unit) for unit in UNITS}


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
        return known.get(self.selection.reference or REFERENCE)

    @property
    def own(self) -> tuple[Contestant, ...]:
        """Those with models of their own."""
        return tuple(contestant for contestant in self.contestants if contestant.twin_of is None)

    @property
    def spread(self) -> Spread | None:
        """Between mixtures and between seeds, over models that are not the same.

        None where all mixtures have the same weights, so that there is one row of models.
        """
        rows = [i for i, c in enumerate(self.contestants) if c.twin_of is None]
        return spread(self.averages[rows]) if len(rows) > 1 else None

    def multiples(self, contestant: Contestant) -> dict[str, float | None]:
        """FLOPs and device-seconds over the reference's; None where there is no such ratio."""
        units = dict.fromkeys(UNITS) if self.reference is None else self.reference.amounts
        return {
            name: amount / unit if amount is not None and unit else None
            for (name, amount), unit in zip(contestant.amounts.items(), units.values(), strict=True)
        }

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
    folder = _with_uniform(folder)
    ledger = ledger_of(folder)
    found = [_contestant(folder, ledger, selection, name) for name in selection.names]
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


def _contestant(folder: RunFolder, ledger: Ledger, selection: Selection, name: str) -> Contestant:
    path = f"{folder.root / MIXTURE / name}.json"
    if name not in folder.mixtures:
        raise UserError(f"{path} is not there; {HOW}")
    mixture = folder.mixtures[name]
    twin = None if _has_models(folder, selection, name) else _twin(folder, selection, mixture)
    names = selection.run_names(twin or name)
    runs = tuple(finished_run(folder, n) for n in names)
    for n, run, seed in zip(names, runs, selection.seeds, strict=True):
        require_drawn_by(mixture, path, n, run, seed)
    return Contestant(
        name=name,
        label=label_of(name),
        mixture=mixture,
        paid=ledger.mixtures[name],
        runs=runs,
        results=tuple(evaluation_of(folder, n, r) for n, r in zip(names, runs, strict=True)),
        twin_of=None if twin is None else label_of(twin),
    )


def _with_uniform(folder: RunFolder) -> RunFolder:
    """The folder with uniform weights, which --mixture uniform needs no file for."""
    if "uniform" in folder.mixtures or not folder.base_runs:
        return folder
    domains = list(next(iter(folder.base_runs.values())).mixture)
    uniform = {"uniform": Mixture.uniform(domains)}
    return dataclasses.replace(folder, mixtures=uniform | folder.mixtures)


def _has_models(folder: RunFolder, selection: Selection, name: str) -> bool:
    return all(run in folder.base_runs for run in selection.run_names(name))


def _twin(folder: RunFolder, selection: Selection, mixture: Mixture) -> str | None:
    """The first of all that are compared with the same weights and models of its own."""
    with_models = (n for n in selection.names if _has_models(folder, selection, n))
    same = (
        name
        for name in with_models
        if name in folder.mixtures and same_weights(folder.mixtures[name].weights, mixture.weights)
    )
    return next(same, None)
