"""Compare mixtures by their cost and by base models with paired seeds, in one table.

Base models of one seed start from the same weights and sample with the same seed, so differences
are paired by seed, which removes the seed's effect.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun, require_comparable
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.artifacts.files import read_json, replacing, require_new, write_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.report import figures
from megatron_chameleon.report.cost import MixtureCost, ledger_of
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.run_folder import (
    BASE,
    EVALUATION,
    MIXTURE,
    REPORT,
    RunFolder,
    same_weights,
)
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
LEAST_RATIO = 2.0
"""Mixtures are distinguishable if their spread is at least this many times that of the seeds."""
UNITS = {"flops": "FLOPs", "device_seconds": "device-seconds"}
HINT = "examples/compare_methods.sh adds what is missing"
REFERENCE = "chameleon"
# Mixtures of these methods also exist with proxies of fewer steps, with this suffix.
SHORTER_PROXIES, SHORTER_SUFFIX = ("doremi", "doge"), "-2k"
# Options of a base run that may differ between compared runs: paths, the compared settings, and
# options that do not change results.
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
class ComparedMixture:
    """A mixture with its cost, and its base models and their evaluations, by seed.

    Attributes:
        paid: cost to obtain the mixture, including its inputs.
        same_as: label of a mixture with the same weights, whose models are shown.
    """

    name: str
    mixture: Mixture
    paid: MixtureCost
    runs: tuple[TrainingRun, ...]
    results: tuple[EvaluationResult, ...]
    same_as: str | None = None

    @property
    def label(self) -> str:
        """As in tables and figures."""
        return mixture_label(self.name)

    @property
    def amounts(self) -> dict[str, float | None]:
        """FLOPs and device-seconds of the complete cost; None where it is not known."""
        known = self.paid.is_known
        return {unit: getattr(self.paid.cost, unit) if known else None for unit in UNITS}


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Mean of a paired difference over seeds, and the standard error of that mean.

    The 95% interval is by Student's t with ``num_seeds`` - 1 degrees of freedom.
    """

    mean: float
    standard_error: float
    num_seeds: int

    @classmethod
    def of(cls, ours: Array, theirs: Array) -> PairedDifference:
        """``ours`` [s] minus ``theirs`` [s], paired by seed."""
        gaps = ours - theirs
        error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        return cls(float(gaps.mean()), error, len(gaps))

    @property
    def half_width(self) -> float:
        """Half the width of the 95% interval."""
        return T_95[min(self.num_seeds - 1, len(T_95)) - 1] * self.standard_error

    @property
    def is_clear(self) -> bool:
        """Whether the 95% interval excludes 0."""
        return abs(self.mean) > self.half_width


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

    @classmethod
    def of(cls, averages: Array) -> MixtureSpread:
        """The two spreads of ``averages`` [m, s], for at least two mixtures and two seeds."""
        num_mixtures, num_seeds = averages.shape
        by_mixture = averages.mean(axis=1, keepdims=True)
        by_seed = averages.mean(axis=0, keepdims=True)
        residuals = averages - by_mixture - by_seed + averages.mean()
        freedom = (num_mixtures - 1) * (num_seeds - 1)
        return cls(float(by_mixture.std(ddof=1)), math.sqrt(float((residuals**2).sum()) / freedom))

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


@dataclasses.dataclass(frozen=True, eq=False)
class MethodComparison:
    """m mixtures with s seeds on k domains.

    Attributes:
        options: with the names and seeds.
        mixtures: in the order of the options.
        domains: k names.
        perplexities: [m, s, k].
    """

    options: CompareMethodsOptions
    mixtures: tuple[ComparedMixture, ...]
    domains: tuple[str, ...]
    perplexities: Array

    def __iter__(self) -> Iterator[ComparedMixture]:
        return iter(self.mixtures)

    @property
    def averages(self) -> Array:
        """[m, s]: average over domains, each with the same weight, as in the paper's tables."""
        averages: Array = self.perplexities.mean(axis=2)
        return averages

    @property
    def baseline(self) -> ComparedMixture:
        """The mixture that the others' perplexities are compared with."""
        return self.mixtures[self.options.mixtures.index(self.options.baseline)]

    @property
    def reference(self) -> ComparedMixture | None:
        """The mixture that the others' costs are divided by, if it is compared."""
        name = self.options.reference or REFERENCE
        return next((each for each in self if each.name == name), None)

    @property
    def spread(self) -> MixtureSpread | None:
        """Over mixtures with models of their own; None where there is only one."""
        rows = [i for i, each in enumerate(self) if each.same_as is None]
        return MixtureSpread.of(self.averages[rows]) if len(rows) > 1 else None

    def multiple(self, mixture: ComparedMixture, unit: str) -> float | None:
        """Cost divided by the reference's; None where that is undefined."""
        amount = mixture.amounts[unit]
        unit_cost = None if self.reference is None else self.reference.amounts[unit]
        return amount / unit_cost if amount is not None and unit_cost else None

    def difference(self, ours: ComparedMixture, theirs: ComparedMixture) -> PairedDifference:
        """The paired difference of two average perplexities."""
        position = self.mixtures.index
        return PairedDifference.of(self.averages[position(ours)], self.averages[position(theirs)])

    def domains_better(self, mixture: ComparedMixture) -> int:
        """Number of domains where the mean perplexity over seeds is below the baseline's."""
        by_domain, position = self.perplexities.mean(axis=1), self.mixtures.index
        return int((by_domain[position(mixture)] < by_domain[position(self.baseline)]).sum())


def compare_methods(options: CompareMethodsOptions) -> MethodComparison:
    """Compare the mixtures in ``options``, print the tables, and write them to 7-report.

    Raises:
        UserError: if something is missing or cannot be compared.
    """
    stem, record = options.run / REPORT / options.name, options.record
    _require_own(stem.with_suffix(".json"), (".png", ".txt", ".md", ".csv"))
    if record is not None:
        _require_own(record, (".md",))
    compared = load_comparison(RunFolder.load(options.run), options)
    tables = [comparison_table(compared), domain_table(compared)]
    text = "\n\n\n".join(map(terminal_table, tables)) + "\n"
    page = "\n\n".join(map(markdown_table, tables))
    picture = f"![Average perplexity against cost]({options.name}.png)"
    content = {
        ".png": figures.png(cost_figure(compared)),
        ".txt": text.encode(),
        ".md": f"# {PAGE_TITLE}\n\n{page}\n\n{picture}\n".encode(),
        ".csv": as_csv(compared).encode(),
    }
    for suffix, data in content.items():
        with replacing(stem.with_suffix(suffix)) as temporary:
            temporary.write_bytes(data)
    write_json(stem.with_suffix(".json"), as_json(compared))
    print(text)
    if record is not None:
        _write_record(compared, record, page)
    print(f"written to {stem}.txt, .md, .csv, .json and .png", flush=True)
    return compared


def load_comparison(folder: RunFolder, options: CompareMethodsOptions) -> MethodComparison:
    """Read the mixtures, runs and evaluations in ``options`` from ``folder``.

    Raises:
        UserError: if something is missing, unfinished, or cannot be compared.
    """
    if "uniform" not in folder.mixtures and folder.base_runs:
        # --mixture uniform needs no file.
        uniform = Mixture.uniform(list(next(iter(folder.base_runs.values())).mixture))
        folder = dataclasses.replace(folder, mixtures={"uniform": uniform} | folder.mixtures)
    costs = ledger_of(folder).mixtures
    mixtures = tuple(_load_mixture(folder, options, name, costs) for name in options.mixtures)
    results = {
        f"{EVALUATION}/{name}.json": result
        for each in mixtures
        for name, result in zip(options.run_names(each.name), each.results, strict=True)
    }
    require_comparable(results)
    _require_same_settings([run for each in mixtures for run in each.runs])
    domains = tuple(mixtures[0].results[0].domains)
    for path, result in results.items():
        if set(result.domains) != set(domains):
            raise UserError(f"{path} has other domains than the first one; {HINT}")
    perplexities = np.array(
        [[[r.domains[d].perplexity for d in domains] for r in each.results] for each in mixtures]
    )
    return MethodComparison(options, mixtures, domains, perplexities)


def mixture_label(name: str) -> str:
    """Label of the mixture ``name``; doremi-2k is "DoReMi 2k"."""
    for known in (name, name.rpartition("-")[0]):
        if known in LABELS:
            return f"{LABELS[known]} {name.removeprefix(known).removeprefix('-')}".strip()
    return name


def _load_mixture(
    folder: RunFolder,
    options: CompareMethodsOptions,
    name: str,
    costs: Mapping[str, MixtureCost],
) -> ComparedMixture:
    path = folder.root / MIXTURE / f"{name}.json"
    if name not in folder.mixtures:
        raise UserError(f"{path} does not exist; {HINT}")
    mixture, source = folder.mixtures[name], name

    def has_models(mixture: str) -> bool:
        return all(run in folder.base_runs for run in options.run_names(mixture))

    if not has_models(name):
        same = (
            other
            for other in options.mixtures
            if other in folder.mixtures
            and has_models(other)
            and same_weights(folder.mixtures[other].weights, mixture.weights)
        )
        source = next(same, name)
    runs, results = [], []
    for seed, base in zip(options.seeds, options.run_names(source), strict=True):
        run, result = folder.base_runs.get(base), folder.evaluations.get(base)
        if run is None or run.status != "finished":
            state = "does not exist" if run is None else f"is {run.status}"
            raise UserError(f"{folder.root / BASE / base} {state}; {HINT}")
        if not same_weights(run.mixture, mixture.weights):
            raise UserError(
                f"{path} has changed since {BASE}/{base} was trained with it; delete that run and "
                f"its evaluation, and {HINT}"
            )
        trained_with = run.provenance.options.get("seed")
        if trained_with != seed:
            raise UserError(
                f"{BASE}/{base} was trained with --seed {trained_with}, unlike its name; delete "
                f"it, and {HINT}"
            )
        if result is None:
            raise UserError(f"{folder.root / EVALUATION / base}.json does not exist; {HINT}")
        _require_last_checkpoint(folder.root / EVALUATION / f"{base}.json", result, run)
        runs.append(run)
        results.append(result)
    same_as = None if source == name else mixture_label(source)
    return ComparedMixture(name, mixture, costs[name], tuple(runs), tuple(results), same_as)


def _last_checkpoint(run: TrainingRun) -> CheckpointRecord:
    folders = checkpoint_folders(run.root)
    if not folders:
        raise UserError(
            f"{run.root} has no checkpoint to match its evaluation with; put it back, or delete "
            f"the run, and {HINT}"
        )
    return CheckpointRecord.load(folders[-1])


def _require_last_checkpoint(path: Path, result: EvaluationResult, run: TrainingRun) -> None:
    """Raise UserError unless ``result``, read from ``path``, is of the last weights of ``run``."""
    if result.step != run.step:
        raise UserError(f"{path} is of step {result.step}, the run has {run.step}; {HINT}")
    checkpoint = _last_checkpoint(run)
    if result.checkpoint_hash != checkpoint.hash:
        raise UserError(
            f"{path} is of other weights than {checkpoint.root} (it names {result.checkpoint}); "
            f"{HINT}"
        )


def _require_same_settings(runs: Sequence[TrainingRun]) -> None:
    """Raise UserError unless the base runs differ in their mixture and seed only."""
    first = runs[0]
    one = first.provenance.options
    for run in runs[1:]:
        other = run.provenance.options
        for key in dict.fromkeys([*one, *other]):
            if key not in MAY_DIFFER and one.get(key) != other.get(key):
                raise UserError(
                    f"{run.root} and {first.root} differ in the option {key} "
                    f"({other.get(key)} and {one.get(key)}); compare runs that differ in their "
                    "mixture and seed only"
                )


def require_choice(options: CompareMethodsOptions, methods: Collection[str]) -> None:
    """Raise UserError for a mixture that is neither one of ``methods`` nor an existing file."""
    known = {*methods, *(f"{name}{SHORTER_SUFFIX}" for name in SHORTER_PROXIES)}
    for name in options.mixtures:
        path = options.run / MIXTURE / f"{name}.json"
        if name not in known and not path.is_file():
            raise UserError(
                f"--mixtures {name}: unknown method, and there is no {path}; "
                f"choose from {', '.join(sorted(known))}"
            )


def require_evaluations(options: CompareMethodsOptions) -> None:
    """Raise UserError for a base run whose last checkpoint has not been evaluated."""
    for base in itertools.chain.from_iterable(map(options.run_names, options.mixtures)):
        path = options.run / EVALUATION / f"{base}.json"
        result = EvaluationResult.load(path)
        _require_last_checkpoint(path, result, TrainingRun.load(options.run / BASE / base))


def comparison_table(compared: MethodComparison) -> Table:
    """A column per mixture: weights, average perplexity over seeds, and cost to obtain it."""
    baseline, averages = compared.baseline, compared.averages
    means, deviations = averages.mean(axis=1), averages.std(axis=1, ddof=1)
    gaps = [compared.difference(each, baseline) for each in compared]

    def except_baseline(texts: Iterable[str]) -> list[str]:
        return [MISSING if e is baseline else t for e, t in zip(compared, texts, strict=True)]

    better = (f"{compared.domains_better(each)} of {len(compared.domains)}" for each in compared)
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
    forms: list[tuple[str, str, Callable[[float], str]]] = [
        ("FLOPs to obtain the mixture", "flops", lambda n: format_flops(n) if n else "0"),
        ("device-seconds for that", "device_seconds", "{:,.1f}".format),
    ]
    for label, unit, form in forms:
        amounts = [each.amounts[unit] for each in compared]
        summary.append([label, *(UNKNOWN if each is None else form(each) for each in amounts)])
    for unit, label in UNITS.items() if compared.reference is not None else ():
        assert compared.reference is not None
        ratios = [format_multiple(compared.multiple(each, unit)) for each in compared]
        summary.append([f"{label} / {compared.reference.label}'s", *ratios])
    return Table.of(
        "Mixtures head to head",
        ["weight of", *(each.label for each in compared)],
        [
            [name, *(format_weight(each.mixture.weights.get(name, 0.0)) for each in compared)]
            for name in compared.domains
        ],
        summary,
        notes(compared),
    )


def domain_table(compared: MethodComparison) -> Table:
    """Per domain: mean perplexity over seeds, and its standard deviation."""
    means = compared.perplexities.mean(axis=1)
    deviations = compared.perplexities.std(axis=1, ddof=1)
    return Table.of(
        "Held-out perplexity by domain",
        ["domain", *(each.label for each in compared)],
        [
            [name, *cells_of(means[:, k], format_perplexity, min, deviations[:, k])]
            for k, name in enumerate(compared.domains)
        ],
        notes=["Mean over seeds ± standard deviation; the lowest mean of each row is marked."],
    )


def format_multiple(multiple: float | None) -> str:
    """Like "9.8x"; '-' for None."""
    if multiple is None:
        return MISSING
    return f"{multiple:.2f}x" if multiple < 10 else f"{multiple:.1f}x"


def notes(compared: MethodComparison) -> list[str]:
    """Notes below the table: protocol, significance and cost accounting."""
    first, baseline, seeds = compared.mixtures[0], compared.baseline, compared.options.seeds
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
    spread = compared.spread
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
        each.label
        for each in compared
        if (each.same_as or each.label) != (baseline.same_as or baseline.label)
        and not compared.difference(each, baseline).is_clear
    ]
    if unclear:
        sentences.append(
            f"No significant difference from {baseline.label} (95% interval of the paired "
            f"difference, Student's t over {len(seeds)} seeds): {', '.join(unclear)}."
        )
    means = dict(zip(compared.options.mixtures, compared.averages.mean(axis=1), strict=True))
    own = [each for each in compared if each.same_as is None]
    ranked = sorted(own, key=lambda each: means[each.name])
    if len(ranked) > 1:
        pairs = [
            f"{better.label} and {worse.label}"
            for better, worse in itertools.pairwise(ranked)
            if not compared.difference(worse, better).is_clear
        ]
        doubt = f" No significant difference between neighbours: {', '.join(pairs)}."
        order = " < ".join(each.label for each in ranked)
        sentences.append(f"In order of average perplexity: {order}.{doubt if pairs else ''}")
    sentences.append(
        "Intervals are not corrected for the number of pairs: of twenty mixtures without any "
        "effect about one would seem different. The domains in which a mixture is better are those "
        "with a lower mean over seeds, by however little: a mixture without any effect would be "
        "better in about half of them."
    )
    sentences += [
        f"{each.label} has the weights of {each.same_as}: the same models are shown."
        for each in compared
        if each.same_as is not None
    ]
    sentences.append(
        "The cost to obtain a mixture is complete, as if it were the only one: every proxy "
        "trained for it (Chameleon's, also DoReMi's reference, all members of a swarm), passes "
        "over held-out text, embeddings, and the final algebra or fit. FLOPs are counted from the "
        "models' shapes; device-seconds are seconds times the devices (GPUs or CPU processes) "
        "held, without process start-up."
    )
    sentences += [
        f"The cost of {each.label} is unknown, since these are missing or have no cost: "
        f"{', '.join(each.paid.missing)}."
        for each in compared
        if not each.paid.is_known
    ]
    return sentences


def cost_figure(compared: MethodComparison) -> Figure:
    """Average perplexity against FLOPs: a dot for each base model, a bar at each mixture's mean.

    The axis of FLOPs is logarithmic, with a place on the left for mixtures without cost and one on
    the right for those of unknown cost.
    """
    figure = figures.new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    flops = np.array([e.amounts["flops"] for e in compared], dtype=np.float64)  # None becomes NaN
    places = places_of(flops)
    handles = []
    for i, averages in enumerate(compared.averages):
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
    figures.legend_above(figure, handles, [each.label for each in compared])
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


def _require_own(path: Path, suffixes: Sequence[str]) -> None:
    """Raise UserError if ``path``, also with ``suffixes``, is not an earlier comparison."""
    if path.is_file() and read_json(path, "choose another name").keys() >= {"seeds", "mixtures"}:
        return
    require_new([path, *map(path.with_suffix, suffixes)], "choose another name")


def _write_record(compared: MethodComparison, path: Path, page: str) -> None:
    """Write date, machine, command and tables as JSON and Markdown."""
    runs = [run for each in compared for run in each.runs]
    layout, versions = _last_checkpoint(runs[0]).layout, runs[0].provenance.versions
    commits = [c for c in dict.fromkeys(run.provenance.git_commit for run in runs) if c]
    machine = {
        "device": layout["device"],
        "devices_of_a_base_run": layout["world_size"],
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.platform(),
    }
    date, seconds = datetime.date.today().isoformat(), compared.options.wall_seconds
    where = {
        "date": date,
        "machine": machine,
        "versions": versions,
        "git_commits": commits,
        "command": compared.options.command,
        **({} if seconds is None else {"wall_seconds": seconds}),
    }
    write_json(path, {**where, **as_json(compared)})
    took = "" if seconds is None else f", in {seconds / 60:.0f} minutes in all"
    text = (
        f"# {PAGE_TITLE}\n\nMade on {date} by `{compared.options.command}`{took}, on "
        f"{machine['device']} ({markdown(str(machine['processor']))}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}), with "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; commit "
        f"{', '.join(commits) or 'unknown'}.\n\n{page}\n"
    )
    with replacing(path.with_suffix(".md")) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"recorded in {path} and {path.with_suffix('.md')}")


def processor_name() -> str:
    """The processor's model name on Linux, elsewhere its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else platform.machine()


def as_json(compared: MethodComparison) -> dict[str, Any]:
    """Every figure of the comparison, unrounded."""
    spread, first = compared.spread, compared.mixtures[0]
    run = first.runs[0]
    return {
        "seeds": list(compared.options.seeds),
        "domains": list(compared.domains),
        "baseline": compared.baseline.name,
        "reference": None if compared.reference is None else compared.reference.name,
        "spread": None
        if spread is None
        else {
            "between_mixtures": spread.mixtures,
            "between_seeds": spread.seeds,
            "ratio": spread.ratio if spread.seeds else None,
            "is_told_apart": spread.is_distinguishable,
        },
        "base_model": {"parameters": run.parameters, "steps": run.step, "tokens": run.tokens},
        "protocol": dataclasses.asdict(first.results[0].protocol),
        "mixtures": {each.name: _details(compared, i) for i, each in enumerate(compared)},
    }


def _details(compared: MethodComparison, i: int) -> dict[str, Any]:
    mixture, averages = compared.mixtures[i], compared.averages[i]
    gap = compared.difference(mixture, compared.baseline)
    # [s, k]
    perplexity = pd.DataFrame(
        compared.perplexities[i],
        index=[f"seed {seed}" for seed in compared.options.seeds],
        columns=list(compared.domains),
    )
    return {
        "label": mixture.label,
        "same_models_as": mixture.same_as,
        "weights": mixture.mixture.weights,
        "average_perplexity": averages.mean(),
        "standard_deviation": averages.std(ddof=1),
        "less_baseline": gap.mean,
        "standard_error": gap.standard_error,
        "half_width_95": gap.half_width,
        "domains_better": compared.domains_better(mixture),
        **mixture.amounts,
        **{f"{unit}_by_reference": compared.multiple(mixture, unit) for unit in UNITS},
        "cost_made_of": list(mixture.paid.parts),
        "cost_missing": list(mixture.paid.missing),
        "perplexity": perplexity.to_dict("index"),
        "mean_perplexity": perplexity.mean().to_dict(),
        "perplexity_standard_deviation": perplexity.std().to_dict(),
    }


def as_csv(compared: MethodComparison) -> str:
    """A line per mixture: its figures, the average of each seed, then weights by domain."""
    lines = []
    for i, each in enumerate(compared):
        line: dict[str, float | int | str] = {"mixture": each.name}
        details = _details(compared, i).items()
        line |= {k: v for k, v in details if isinstance(v, float | int | str)}
        seeds = zip(compared.options.seeds, compared.averages[i], strict=True)
        line |= {f"average_perplexity_seed_{seed}": average for seed, average in seeds}
        line |= {f"weight:{d}": each.mixture.weights.get(d, 0.0) for d in compared.domains}
        lines.append(line)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    texts = [[line.get(column, "") for column in columns] for line in lines]
    return csv_text(pd.DataFrame(texts, columns=columns, dtype=object))
