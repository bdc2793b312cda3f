"""The head-to-head of methods: base models of several mixtures with paired seeds, in one table.

Base models of one seed start from the same weights and sample with the same seed, so differences
are paired by seed, which removes what a seed does to all of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron_chameleon.artifacts import (
    Cost,
    EvaluationResult,
    Mixture,
    TrainingRun,
    require_comparable,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.artifacts.files import read_json, replacing, write_json
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.errors import UserError
from megatron_chameleon.report import figures
from megatron_chameleon.report.comparison import same_weights
from megatron_chameleon.report.cost import Ledger, MixtureCost, ledger_of
from megatron_chameleon.report.run_folder import BASE, EVALUATION, MIXTURE, REPORT, RunFolder
from megatron_chameleon.report.tables import (
    MISSING,
    UNKNOWN,
    Table,
    cells_of,
    csv_text,
    format_flops,
    format_perplexity,
    format_weight,
    markdown,
    markdown_table,
    terminal_table,
)

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
LEAST_RATIO = 2.0
"""Mixtures count as distinguishable if their spread is this many times that between seeds."""
UNITS = ("flops", "device_seconds")
SCRIPT = "examples/compare_methods.sh"
HOW = f"{SCRIPT} adds what is missing"
REFERENCE = "chameleon"
# Mixtures of these methods also exist with proxies of fewer steps, with this suffix.
SHORTER_PROXIES, SHORTER_SUFFIX = ("doremi", "doge"), "-2k"
# Options of a base run that may differ between compared runs: paths, what is compared, and what
# does not change results.
MAY_DIFFER = {"run_dir", "mixture", "seed", "micro_batch_size", "compile_layers", "parallel"}
MAY_DIFFER |= {"dry_first_step", "log_interval", "save_interval", "overwrite", "checkpointing"}
MAY_DIFFER |= {"stopping", "validation", "logging", "profiling"}
# Student's t, two-sided 95%, for 1 to 10 degrees of freedom; the last one, slightly wide, is used
# for more.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# On the axis, mixtures without cost are this many times left of the cheapest, those of unknown cost
# as far right of the most expensive, each a step apart.
FREE_GAP, FREE_STEP = 10.0, 1.3
PAGE_TITLE = "Methods compared"

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is compared: mixtures by their file names, and the seeds of the base models.

    A base run is named after its mixture, then ``run_suffix``, then ``-seedN``. ``reference`` is
    the mixture that costs are divided by; None takes Chameleon's, if it is compared.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    run_suffix: str = ""
    baseline: str = "uniform"
    reference: str | None = None

    def check(self) -> None:
        """Raise UserError for too few or repeated names or seeds, or a baseline not among them."""
        for flag, values, least in (
            ("--mixtures", self.names, 2),
            ("--seeds", self.seeds, LEAST_SEEDS),
        ):
            if len(set(values)) < len(values) or len(values) < least:
                raise UserError(
                    f"{flag} {' '.join(map(str, values))}: pass at least {least} different ones"
                )
        for flag, name in (("--baseline", self.baseline), ("--reference", self.reference)):
            if name is not None and name not in self.names:
                raise UserError(
                    f"{flag} {name} is not among --mixtures {' '.join(self.names)}; add it, or "
                    f"name another one ({flag[2:].upper()}=NAME of {SCRIPT})"
                )

    def run_name(self, mixture: str, seed: int) -> str:
        """Name of a base run and of its evaluation."""
        return f"{mixture}{self.run_suffix}-seed{seed}"

    def run_names(self, mixture: str) -> list[str]:
        """Names of the base runs of a mixture, in the order of the seeds."""
        return [self.run_name(mixture, seed) for seed in self.seeds]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A mixture, its cost, and its base models and their evaluations, by seed.

    Attributes:
        paid: cost to obtain the mixture with everything it was made from.
        twin_of: label of a mixture with the same weights, whose models are shown.
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
        """Label of the mixture whose models are shown; its own, or its twin's."""
        return self.twin_of or self.label

    @property
    def cost(self) -> Cost | None:
        """Complete cost to obtain the mixture; None where it is not known."""
        return self.paid.cost if self.paid.is_known else None

    @property
    def amounts(self) -> dict[str, float | None]:
        """FLOPs and device-seconds of the cost, by name."""
        return {unit: None if self.cost is None else getattr(self.cost, unit) for unit in UNITS}


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Mean of a paired difference over seeds, and the standard error of that mean.

    The 95% interval is by Student's t with ``num_seeds`` - 1 degrees of freedom.
    """

    mean: float
    standard_error: float
    num_seeds: int

    @property
    def half_width(self) -> float:
        """Half the width of the 95% interval."""
        return T_95[min(self.num_seeds - 1, len(T_95)) - 1] * self.standard_error

    @property
    def is_clear(self) -> bool:
        """Whether the 95% interval excludes 0."""
        return abs(self.mean) > self.half_width


def difference(ours: Array, theirs: Array) -> PairedDifference:
    """``ours`` [s] minus ``theirs`` [s], paired by seed."""
    gaps = ours - theirs
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    return PairedDifference(float(gaps.mean()), error, len(gaps))


@dataclasses.dataclass(frozen=True)
class MixtureSpread:
    """Spread between mixtures and between seeds.

    Attributes:
        mixtures: standard deviation, over mixtures, of their means over seeds.
        seeds: pooled standard deviation within mixtures after removing the seed's effect: the root
            of the sum of squared residuals of y[m, s] = mixture m + seed s, divided by their
            (m - 1)(s - 1) degrees of freedom.
    """

    mixtures: float
    seeds: float

    @property
    def ratio(self) -> float:
        """``mixtures / seeds``, infinite without any effect of the seed.

        Without any effect of the mixture it is around 1 / sqrt(number of seeds).
        """
        if self.seeds == 0:
            return math.inf if self.mixtures > 0 else 0.0
        return self.mixtures / self.seeds

    @property
    def is_distinguishable(self) -> bool:
        """Whether the ratio is ``LEAST_RATIO`` or more."""
        return self.ratio >= LEAST_RATIO


def mixture_spread(averages: Array) -> MixtureSpread:
    """The two spreads of ``averages`` [m, s], for at least two mixtures and two seeds."""
    num_mixtures, num_seeds = averages.shape
    by_mixture = averages.mean(axis=1, keepdims=True)
    by_seed = averages.mean(axis=0, keepdims=True)
    residuals = averages - by_mixture - by_seed + averages.mean()
    freedom = (num_mixtures - 1) * (num_seeds - 1)
    return MixtureSpread(
        float(by_mixture.std(ddof=1)), math.sqrt(float((residuals**2).sum()) / freedom)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class HeadToHead:
    """Everything that is compared: m mixtures with s seeds on k domains.

    Attributes:
        selection: what was asked for.
        contestants: in the order of its names.
        domains: k names.
        perplexities: [m, s, k].
    """

    selection: Selection
    contestants: tuple[Contestant, ...]
    domains: tuple[str, ...]
    perplexities: Array

    def __iter__(self) -> Iterator[Contestant]:
        return iter(self.contestants)

    @property
    def averages(self) -> Array:
        """[m, s]: average over domains, each with the same weight, as in the paper's tables."""
        averages: Array = self.perplexities.mean(axis=2)
        return averages

    @property
    def baseline(self) -> Contestant:
        """The mixture that the others' perplexities are compared with."""
        return self.contestants[self.selection.names.index(self.selection.baseline)]

    @property
    def reference(self) -> Contestant | None:
        """The mixture that the others' costs are divided by, if it is compared."""
        known = {contestant.name: contestant for contestant in self.contestants}
        return known.get(self.selection.reference or REFERENCE)

    @property
    def spread(self) -> MixtureSpread | None:
        """Over mixtures with models of their own; None where there is only one."""
        rows = [i for i, contestant in enumerate(self) if contestant.twin_of is None]
        return mixture_spread(self.averages[rows]) if len(rows) > 1 else None

    def multiples(self, contestant: Contestant) -> dict[str, float | None]:
        """FLOPs and device-seconds divided by the reference's; None where that is undefined."""
        units = dict.fromkeys(UNITS) if self.reference is None else self.reference.amounts
        return {
            name: amount / unit if amount is not None and (unit := units[name]) else None
            for name, amount in contestant.amounts.items()
        }

    def difference(self, ours: Contestant, theirs: Contestant) -> PairedDifference:
        """The paired difference of two average perplexities."""
        position = self.contestants.index
        return difference(self.averages[position(ours)], self.averages[position(theirs)])

    def domains_better(self, contestant: Contestant) -> int:
        """Number of domains where the mean perplexity over seeds is below the baseline's."""
        by_domain = self.perplexities.mean(axis=1)
        ours = by_domain[self.contestants.index(contestant)]
        return int((ours < by_domain[self.contestants.index(self.baseline)]).sum())


def head_to_head(folder: RunFolder, selection: Selection) -> HeadToHead:
    """Read what ``selection`` names from ``folder``.

    Raises:
        UserError: if something is missing, unfinished, or cannot be compared.
    """
    selection.check()
    if "uniform" not in folder.mixtures and folder.base_runs:
        # --mixture uniform needs no file.
        uniform = Mixture.uniform(list(next(iter(folder.base_runs.values())).mixture))
        folder = dataclasses.replace(folder, mixtures={"uniform": uniform} | folder.mixtures)
    ledger = ledger_of(folder)
    found = [_contestant(folder, ledger, selection, name) for name in selection.names]
    results = {
        f"{EVALUATION}/{selection.run_name(c.name, seed)}.json": result
        for c in found
        for seed, result in zip(selection.seeds, c.results, strict=True)
    }
    require_comparable(results)
    _require_same_settings([run for c in found for run in c.runs])
    domains = tuple(found[0].results[0].domains)
    for path, result in results.items():
        if set(result.domains) != set(domains):
            raise UserError(f"{path} has other domains than the first one; {HOW}")
    perplexities = np.array(
        [[[r.domains[d].perplexity for d in domains] for r in c.results] for c in found]
    )
    return HeadToHead(selection, tuple(found), domains, perplexities)


def mixture_label(name: str) -> str:
    """Label of the mixture ``name``; doremi-2k is "DoReMi 2k"."""
    for known in (name, name.rpartition("-")[0]):
        if known in LABELS:
            return f"{LABELS[known]} {name.removeprefix(known).removeprefix('-')}".strip()
    return name


def _contestant(folder: RunFolder, ledger: Ledger, selection: Selection, name: str) -> Contestant:
    path = folder.root / MIXTURE / f"{name}.json"
    if name not in folder.mixtures:
        raise UserError(f"{path} is not there; {HOW}")
    mixture, twin = folder.mixtures[name], None

    def has_models(mixture: str) -> bool:
        return all(run in folder.base_runs for run in selection.run_names(mixture))

    if not has_models(name):
        same = (
            other
            for other in selection.names
            if other in folder.mixtures
            and has_models(other)
            and same_weights(folder.mixtures[other].weights, mixture.weights)
        )
        twin = next(same, None)
    runs, results = [], []
    for seed, base in zip(selection.seeds, selection.run_names(twin or name), strict=True):
        run, result = folder.base_runs.get(base), folder.evaluations.get(base)
        if run is None or run.status != "finished":
            what = "is not there" if run is None else f"is {run.status}"
            raise UserError(f"{folder.root / BASE / base} {what}; {HOW}")
        if not same_weights(run.mixture, mixture.weights):
            raise UserError(
                f"{path} has changed since {BASE}/{base} was trained with it; delete that run and "
                f"its evaluation, and {HOW}"
            )
        trained_with = run.provenance.options.get("seed")
        if trained_with != seed:
            raise UserError(
                f"{BASE}/{base} was trained with --seed {trained_with}, unlike its name; delete "
                f"it, and {HOW}"
            )
        if result is None:
            raise UserError(f"{folder.root / EVALUATION / base}.json is not there; {HOW}")
        _require_last_checkpoint(folder.root / EVALUATION / f"{base}.json", result, run)
        runs.append(run)
        results.append(result)
    label = None if twin is None else mixture_label(twin)
    paid = ledger.mixtures[name]
    return Contestant(name, mixture_label(name), mixture, paid, tuple(runs), tuple(results), label)


def _last_checkpoint(run: TrainingRun) -> CheckpointRecord:
    folders = checkpoint_folders(run.root)
    if not folders:
        raise UserError(
            f"{run.root} has no checkpoint to match its evaluation with; put it back, or delete "
            f"the run, and {HOW}"
        )
    return CheckpointRecord.load(folders[-1])


def _require_last_checkpoint(path: Path, result: EvaluationResult, run: TrainingRun) -> None:
    """Raise UserError unless ``result``, read from ``path``, is of the last weights of ``run``."""
    if result.step != run.step:
        raise UserError(f"{path} is of step {result.step}, the run has {run.step}; {HOW}")
    checkpoint = _last_checkpoint(run)
    if result.checkpoint_hash != checkpoint.hash:
        raise UserError(
            f"{path} is of other weights than {checkpoint.root} (it names {result.checkpoint}); "
            f"{HOW}"
        )


def _require_same_settings(runs: Iterable[TrainingRun]) -> None:
    """Raise UserError unless the base runs differ in their mixture and seed only."""

    def relevant(options: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key not in MAY_DIFFER}

    first, *others = runs
    one = relevant(first.provenance.options)
    for run in others:
        other = relevant(run.provenance.options)
        different = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        if different:
            raise UserError(
                f"{run.root} and {first.root} differ in the option {different[0]} "
                f"({other.get(different[0])} and {one.get(different[0])}); compare runs that "
                "differ in their mixture and seed only"
            )


def require_choice(run: Path, selection: Selection, methods: Collection[str]) -> None:
    """Check that what ``selection`` names can be compared once it exists.

    Args:
        run: the run folder, which need not exist.
        selection: the mixtures and seeds.
        methods: names of the known methods.

    Raises:
        UserError: if it cannot, or a mixture is neither a method nor an existing file.
    """
    selection.check()
    known = {*methods, *(f"{name}{SHORTER_SUFFIX}" for name in SHORTER_PROXIES)}
    for name in selection.names:
        path = run / MIXTURE / f"{name}.json"
        if name not in known and not path.is_file():
            raise UserError(
                f"--mixtures {name}: unknown method, and there is no {path}; "
                f"choose from {', '.join(sorted(known))}"
            )


def require_evaluations(run: Path, selection: Selection) -> None:
    """Check that the base runs of ``selection`` have been evaluated at their last checkpoints.

    Raises:
        UserError: naming the first evaluation that is missing, or of other weights.
    """
    for name in selection.names:
        for base in selection.run_names(name):
            path = run / EVALUATION / f"{base}.json"
            result = EvaluationResult.load(path)
            _require_last_checkpoint(path, result, TrainingRun.load(run / BASE / base))


def comparison_table(found: HeadToHead) -> Table:
    """A column per mixture: weights, average perplexity over seeds, and cost to obtain it."""
    baseline, averages = found.baseline, found.averages
    means, deviations = averages.mean(axis=1), averages.std(axis=1, ddof=1)

    def except_baseline(texts: Iterable[str]) -> list[str]:
        """Cells that are empty for the baseline itself."""
        return [MISSING if c is baseline else t for c, t in zip(found, texts, strict=True)]

    gaps = [found.difference(c, baseline) for c in found]
    better = (f"{found.domains_better(c)} of {len(found.domains)}" for c in found)
    summary = [
        ["average perplexity", *cells_of(means, format_perplexity, min)],
        ["  standard deviation across seeds", *map(format_perplexity, deviations)],
        [
            f"  minus {baseline.label}'s, paired",
            *except_baseline(f"{gap.mean:+.2f}" for gap in gaps),
        ],
        ["  standard error of that", *except_baseline(f"{gap.standard_error:.2f}" for gap in gaps)],
        [f"domains better than {baseline.label}", *except_baseline(better)],
    ]
    for label, unit, form in (
        (
            "FLOPs to obtain the mixture",
            "flops",
            lambda flops: format_flops(flops).replace("-", "0"),
        ),
        ("device-seconds for that", "device_seconds", "{:,.1f}".format),
    ):
        amounts = [c.amounts[unit] for c in found]
        summary.append([label, *(UNKNOWN if each is None else form(each) for each in amounts)])
    for label, unit in zip(("FLOPs", "device-seconds"), UNITS, strict=True):
        if found.reference is not None:
            ratios = [format_multiple(found.multiples(c)[unit]) for c in found]
            summary.append([f"{label} / {found.reference.label}'s", *ratios])
    return Table.of(
        "Mixtures head to head",
        ["weight of", *(c.label for c in found)],
        [
            [name, *(format_weight(c.mixture.weights.get(name, 0.0)) for c in found)]
            for name in found.domains
        ],
        summary,
        notes(found),
    )


def domain_table(found: HeadToHead) -> Table:
    """Per domain: mean perplexity over seeds, and its standard deviation."""
    means = found.perplexities.mean(axis=1)
    deviations = found.perplexities.std(axis=1, ddof=1)
    return Table.of(
        "Held-out perplexity by domain",
        ["domain", *(c.label for c in found)],
        [
            [name, *cells_of(means[:, k], format_perplexity, min, deviations[:, k])]
            for k, name in enumerate(found.domains)
        ],
        notes=["Mean over seeds ± standard deviation; the lowest mean of each row is marked."],
    )


def format_multiple(multiple: float | None) -> str:
    """Like "9.8x"; '-' for None."""
    if multiple is None:
        return MISSING
    return f"{multiple:.2f}x" if multiple < 10 else f"{multiple:.1f}x"


def notes(found: HeadToHead) -> list[str]:
    """The sentences below the table: what was measured, distinguished and counted."""
    first, baseline, seeds = found.contestants[0], found.baseline, found.selection.seeds
    run, protocol = first.runs[0], first.results[0].protocol
    most = f", at most {protocol.max_tokens:,} tokens a domain" if protocol.max_tokens else ""
    sentences = [
        f"Each mixture was computed once and trains models of {run.parameters:,} parameters for "
        f"{run.step:,} steps ({run.tokens:,} tokens) with the seeds "
        f"{', '.join(map(str, seeds[:-1]))} and {seeds[-1]}; models of one seed start from the "
        f"same weights and sample with the same seed. Perplexity on the {protocol.split} split, in "
        f"{protocol.packing} windows of {protocol.window_length} tokens{most}, averaged over "
        "domains, each with the same weight."
    ]
    spread = found.spread
    if spread is None:
        sentences.append(
            "All of these mixtures have the same weights and show the same models, so there is no "
            "spread between mixtures."
        )
    else:
        verdict = (
            "the mixtures are distinguishable"
            if spread.is_distinguishable
            else "the mixtures are not distinguishable: train the base models longer, or more of "
            "them"
        )
        sentences.append(
            f"Spread between mixtures over spread between seeds: {spread.mixtures:.2f} / "
            f"{spread.seeds:.2f} = {spread.ratio:.1f}; the threshold is {LEAST_RATIO:g}, so "
            f"{verdict}. The first is the standard deviation of the mixtures' means over seeds, "
            "the second that of single models after removing the means of their mixture and of "
            f"their seed; without any effect of the mixture the ratio is around "
            f"{len(seeds) ** -0.5:.1f}."
        )
    unclear = [
        c.label
        for c in found
        if c.models != baseline.models and not found.difference(c, baseline).is_clear
    ]
    if unclear:
        sentences.append(
            f"No significant difference from {baseline.label} (95% interval of the paired "
            f"difference, Student's t over {len(seeds)} seeds): {', '.join(unclear)}."
        )
    means = dict(zip(found.selection.names, found.averages.mean(axis=1), strict=True))
    ranked = sorted((c for c in found if c.twin_of is None), key=lambda c: means[c.name])
    if len(ranked) > 1:
        order = " < ".join(c.label for c in ranked)
        pairs = [
            f"{better.label} and {worse.label}"
            for better, worse in itertools.pairwise(ranked)
            if not found.difference(worse, better).is_clear
        ]
        doubt = f" No significant difference between neighbours: {', '.join(pairs)}."
        sentences.append(f"In order of average perplexity: {order}.{doubt if pairs else ''}")
    sentences.append(
        "Intervals are not corrected for the number of pairs: of twenty mixtures without any "
        "effect about one would seem different. The domains in which a mixture is better are those "
        "with a lower mean over seeds, by however little: a mixture without any effect would be "
        "better in about half of them."
    )
    sentences += [
        f"{c.label} has the weights of {c.twin_of}: the same models are shown."
        for c in found
        if c.twin_of is not None
    ]
    sentences.append(
        "The cost to obtain a mixture is complete, as if it were the only one: every proxy "
        "trained for it (Chameleon's, also DoReMi's reference, all members of a swarm), passes "
        "over held-out text, embeddings, and the final algebra or fit. FLOPs are counted from the "
        "models' shapes; device-seconds are seconds times the devices (GPUs or CPU processes) "
        "held, without process start-up."
    )
    sentences += [
        f"The cost of {c.label} is unknown, since these are missing or have no cost: "
        f"{', '.join(c.paid.missing)}."
        for c in found
        if c.cost is None
    ]
    return sentences


def head_to_head_figure(found: HeadToHead) -> Figure:
    """Average perplexity against FLOPs: a dot for each base model, a bar at each mixture's mean.

    The axis of FLOPs is logarithmic, with a place on the left for mixtures without cost and one on
    the right for those of unknown cost.
    """
    figure = figures.new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    flops = np.array([c.amounts["flops"] for c in found], dtype=np.float64)  # None becomes NaN
    places = places_of(flops)
    handles = []
    for i, averages in enumerate(found.averages):
        color, marker = figures.color_of(i), "o" if i < len(figures.COLORS) else "s"
        x = np.full(len(averages), places[i])
        handles += axes.plot(x, averages, marker, color=color, ms=4.5, ls="none")
        axes.plot(places[i], averages.mean(), "_", color=color, ms=20, mew=2)
    axes.set_xscale("log")
    ticks = ticks_of(flops, places)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("FLOPs to obtain the mixture")
    axes.set_ylabel("average held-out perplexity")
    axes.grid(color=figures.GRID_COLOR)
    figures.tidy(axes)
    figures.legend_above(figure, handles, [c.label for c in found])
    return figure


def places_of(flops: Array) -> Array:
    """Positions on the axis: mixtures of 0 FLOPs on the left, of unknown (NaN) on the right."""
    is_free, is_unknown = flops == 0, np.isnan(flops)
    costs = flops[flops > 0] if (flops > 0).any() else np.array([FREE_GAP])
    places = flops.copy()
    places[is_free] = costs.min() / FREE_GAP / FREE_STEP ** np.arange(is_free.sum())[::-1]
    places[is_unknown] = costs.max() * FREE_GAP * FREE_STEP ** np.arange(is_unknown.sum())
    return places


def ticks_of(flops: Array, places: Array) -> dict[float, str]:
    """Position -> label of the ticks: round numbers, and "none" and "unknown"."""
    costs = flops[flops > 0]
    ticks = {}
    for word, those in (("none", flops == 0), ("unknown", np.isnan(flops))):
        if those.any():
            ticks[float(np.exp(np.log(places[those]).mean()))] = word
    if costs.size:
        exponents = np.arange(np.floor(np.log10(costs.min())), np.ceil(np.log10(costs.max())) + 1)
        steps = (1, 2, 5) if len(exponents) < 4 else (1,)
        rounds = [step * 10**exponent for exponent in exponents for step in steps]
        ticks |= {x: f"{x:.0e}" for x in rounds if costs.min() / 2 <= x <= costs.max() * 2}
    return ticks


@dataclasses.dataclass(frozen=True)
class Record:
    """Where a comparison is recorded, with the command and duration that made it."""

    path: Path
    command: str
    wall_seconds: float | None

    @classmethod
    def from_options(
        cls, path: Path | None, command: str | None, wall_seconds: float | None
    ) -> Record | None:
        """The record of the options, None without a path. Raises UserError for half of one."""
        if path is None:
            return None
        if command is None:
            raise UserError("--record also needs --command, the line that made the comparison")
        if path.suffix != ".json":
            raise UserError(f"--record {path}: the name must end in .json")
        return cls(path, command, wall_seconds)


def report_head_to_head(
    run: Path, selection: Selection, name: str, record: Record | None = None
) -> HeadToHead:
    """Compare what ``run`` holds, print the tables, and write them to its 7-report.

    Args:
        run: the run folder.
        selection: the mixtures and seeds.
        name: of the files, without their suffixes.
        record: where the comparison is recorded as well.

    Raises:
        UserError: if something is missing or cannot be compared.
    """
    stem = run / REPORT / name
    _require_own(stem.with_suffix(".json"), (".png", ".txt", ".md", ".csv"))
    if record is not None:
        _require_own(record.path, (".md",))
    found = head_to_head(RunFolder.load(run), selection)
    tables = [comparison_table(found), domain_table(found)]
    text = "\n\n\n".join(map(terminal_table, tables)) + "\n"
    page = "\n\n".join(map(markdown_table, tables))
    picture = f"![Average perplexity against cost]({name}.png)"
    content = {
        ".png": figures.png(head_to_head_figure(found)),
        ".txt": text.encode(),
        ".md": f"# {PAGE_TITLE}\n\n{page}\n\n{picture}\n".encode(),
        ".csv": as_csv(found).encode(),
    }
    for suffix, data in content.items():
        with replacing(stem.with_suffix(suffix)) as temporary:
            temporary.write_bytes(data)
    write_json(stem.with_suffix(".json"), as_json(found))
    print(text)
    if record is not None:
        _write_record(found, record, page)
    print(f"written to {stem}.txt, .md, .csv, .json and .png", flush=True)
    return found


def _require_own(path: Path, suffixes: Sequence[str]) -> None:
    """Raise UserError if ``path``, also with ``suffixes``, is not an earlier comparison."""
    if path.is_file() and read_json(path, "choose another name").keys() >= {"seeds", "mixtures"}:
        return
    require_new([path, *map(path.with_suffix, suffixes)], "choose another name")


def _write_record(found: HeadToHead, record: Record, page: str) -> None:
    """Write when, where and by which command, and the tables, as JSON and Markdown."""
    runs = [run for c in found for run in c.runs]
    layout = _last_checkpoint(runs[0]).layout
    commits = [c for c in dict.fromkeys(run.provenance.git_commit for run in runs) if c]
    machine = {
        "device": layout["device"],
        "devices_of_a_base_run": layout["world_size"],
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.platform(),
    }
    versions = runs[0].provenance.versions
    date = datetime.date.today().isoformat()
    seconds = record.wall_seconds
    where = {
        "date": date,
        "machine": machine,
        "versions": versions,
        "git_commits": commits,
        "command": record.command,
        **({} if seconds is None else {"wall_seconds": seconds}),
    }
    write_json(record.path, {**where, **as_json(found)})
    took = "" if seconds is None else f", in {seconds / 60:.0f} minutes in all"
    text = (
        f"# {PAGE_TITLE}\n\nMade on {date} by `{record.command}`{took}, on {machine['device']} "
        f"({markdown(str(machine['processor']))}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}), with "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; commit "
        f"{', '.join(commits) or 'unknown'}.\n\n{page}\n"
    )
    with replacing(record.path.with_suffix(".md")) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"recorded in {record.path} and {record.path.with_suffix('.md')}")


def processor_name() -> str:
    """The processor's model name on Linux, elsewhere its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else platform.machine()


def as_json(found: HeadToHead) -> dict[str, Any]:
    """Every figure of the comparison, unrounded."""
    spread, run = found.spread, found.contestants[0].runs[0]
    return {
        "seeds": list(found.selection.seeds),
        "domains": list(found.domains),
        "baseline": found.baseline.name,
        "reference": None if found.reference is None else found.reference.name,
        "spread": None
        if spread is None
        else {
            "between_mixtures": spread.mixtures,
            "between_seeds": spread.seeds,
            "ratio": spread.ratio if spread.seeds else None,
            "is_told_apart": spread.is_distinguishable,
        },
        "base_model": {"parameters": run.parameters, "steps": run.step, "tokens": run.tokens},
        "protocol": dataclasses.asdict(found.contestants[0].results[0].protocol),
        "mixtures": {c.name: _details(found, c) for c in found},
    }


def _details(found: HeadToHead, contestant: Contestant) -> dict[str, Any]:
    i = found.contestants.index(contestant)
    averages, gap = found.averages[i], found.difference(contestant, found.baseline)
    # [s, k]
    perplexity = pd.DataFrame(
        found.perplexities[i],
        index=[f"seed {seed}" for seed in found.selection.seeds],
        columns=list(found.domains),
    )
    return {
        "label": contestant.label,
        "same_models_as": contestant.twin_of,
        "weights": contestant.mixture.weights,
        "average_perplexity": averages.mean(),
        "standard_deviation": averages.std(ddof=1),
        "less_baseline": gap.mean,
        "standard_error": gap.standard_error,
        "half_width_95": gap.half_width,
        "domains_better": found.domains_better(contestant),
        **contestant.amounts,
        **{f"{unit}_by_reference": m for unit, m in found.multiples(contestant).items()},
        "cost_made_of": list(contestant.paid.parts),
        "cost_missing": list(contestant.paid.missing),
        "perplexity": perplexity.to_dict("index"),
        "mean_perplexity": perplexity.mean().to_dict(),
        "perplexity_standard_deviation": perplexity.std().to_dict(),
    }


def as_csv(found: HeadToHead) -> str:
    """A line per mixture: its figures, the average of each seed, then weights by domain."""
    lines = []
    for i, c in enumerate(found):
        details = _details(found, c)
        line: dict[str, float | int | str] = {"mixture": c.name}
        line |= {k: v for k, v in details.items() if isinstance(v, float | int | str)}
        seeds = zip(found.selection.seeds, found.averages[i], strict=True)
        line |= {f"average_perplexity_seed_{seed}": average for seed, average in seeds}
        line |= {f"weight:{d}": c.mixture.weights.get(d, 0.0) for d in found.domains}
        lines.append(line)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    texts = [[line.get(column, "") for column in columns] for line in lines]
    return csv_text(pd.DataFrame(texts, columns=columns, dtype=object))
