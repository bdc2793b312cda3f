"""Compare mixtures by their cost and by base models with paired seeds, in one table.

Base models of one seed start from the same weights and sample with the same seed, so differences
are paired by seed, which removes the seed's effect.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import stdtrit

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


def paired_difference(ours: Array, theirs: Array) -> tuple[float, float, float]:
    """Mean of ``ours`` [s] minus ``theirs`` [s], paired by seed.

    Returns:
        The mean, its standard error, and half the width of its 95% interval by Student's t with
        s - 1 degrees of freedom.
    """
    gaps = ours - theirs
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    return float(gaps.mean()), error, float(stdtrit(len(gaps) - 1, 0.975)) * error


def spread_of(averages: Array) -> dict[str, Any]:
    """Spread between mixtures and between seeds of ``averages`` [m, s], at least two of both.

    Returns:
        ``between_mixtures``: standard deviation, over mixtures, of their means over seeds.
        ``between_seeds``: pooled standard deviation within mixtures after removing the seed's
        effect: the root of the sum of squared residuals of y[m, s] = mixture m + seed s, divided by
        their (m - 1)(s - 1) degrees of freedom. ``ratio`` of the two, infinite without any effect
        of the seed; without any effect of the mixture it is around 1 / sqrt(number of seeds).
        ``is_told_apart``: whether the ratio is ``LEAST_RATIO`` or more.
    """
    by_mixture = averages.mean(axis=1, keepdims=True)
    residuals = averages - by_mixture - averages.mean(axis=0, keepdims=True) + averages.mean()
    freedom = (averages.shape[0] - 1) * (averages.shape[1] - 1)
    mixtures = float(by_mixture.std(ddof=1))
    seeds = math.sqrt(float((residuals**2).sum()) / freedom)
    ratio = mixtures / seeds if seeds else math.inf if mixtures else 0.0
    return {
        "between_mixtures": mixtures,
        "between_seeds": seeds,
        "ratio": ratio,
        "is_told_apart": ratio >= LEAST_RATIO,
    }


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
        return next((each for each in self.mixtures if each.name == name), None)

    @property
    def spread(self) -> dict[str, Any] | None:
        """Over mixtures with models of their own; None where there is only one."""
        rows = [i for i, each in enumerate(self.mixtures) if each.same_as is None]
        return spread_of(self.averages[rows]) if len(rows) > 1 else None

    @functools.cached_property
    def details(self) -> dict[str, dict[str, Any]]:
        """Mixture name -> its unrounded metrics, keyed as in the JSON file."""
        baseline, found = self.options.mixtures.index(self.options.baseline), {}
        means = self.perplexities.mean(axis=1)

        def costs(mixture: ComparedMixture) -> dict[str, float | None]:
            known = mixture.paid.is_known
            return {unit: getattr(mixture.paid.cost, unit) if known else None for unit in UNITS}

        units = {} if self.reference is None else costs(self.reference)
        for i, mixture in enumerate(self.mixtures):
            averages, amounts = self.averages[i], costs(mixture)
            mean, error, half_width = paired_difference(averages, self.averages[baseline])
            seeds = [f"seed {seed}" for seed in self.options.seeds]
            perplexity = pd.DataFrame(self.perplexities[i], seeds, list(self.domains))
            found[mixture.name] = {
                "label": mixture.label,
                "same_models_as": mixture.same_as,
                "weights": mixture.mixture.weights,
                "average_perplexity": averages.mean(),
                "standard_deviation": averages.std(ddof=1),
                "less_baseline": mean,
                "standard_error": error,
                "half_width_95": half_width,
                "domains_better": int((means[i] < means[baseline]).sum()),
                **amounts,
                **{
                    f"{unit}_by_reference": amount / unit_cost
                    if amount is not None and (unit_cost := units.get(unit))
                    else None
                    for unit, amount in amounts.items()
                },
                "cost_made_of": list(mixture.paid.parts),
                "cost_missing": list(mixture.paid.missing),
                "perplexity": perplexity.to_dict("index"),
                "mean_perplexity": perplexity.mean().to_dict(),
                "perplexity_standard_deviation": perplexity.std().to_dict(),
            }
        return found


def compare_methods(options: CompareMethodsOptions) -> MethodComparison:
    """Compare the mixtures in ``options``, print the tables, and write them to 7-report.

    Raises:
        UserError: if something is missing or cannot be compared.
    """
    stem, record = options.run / REPORT / options.name, options.record
    targets = [(stem.with_suffix(".json"), (".png", ".txt", ".md", ".csv"))]
    for path, suffixes in targets + ([] if record is None else [(record, (".md",))]):
        # Only an earlier comparison is replaced.
        keys = read_json(path, "choose another name").keys() if path.is_file() else set()
        if not keys >= {"seeds", "mixtures"}:
            require_new([path, *map(path.with_suffix, suffixes)], "choose another name")
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
    results: dict[str, EvaluationResult] = {}
    costs, mixtures = ledger_of(folder).mixtures, []
    for name in options.mixtures:
        if name not in folder.mixtures:
            raise UserError(f"{folder.root / MIXTURE / name}.json does not exist; {HINT}")
        mixture = folder.mixtures[name]
        # Without models of its own, it shows those of another mixture with the same weights.
        sources = [
            other
            for other in (name, *options.mixtures)
            if other in folder.mixtures
            and all(run in folder.base_runs for run in options.run_names(other))
            and same_weights(folder.mixtures[other].weights, mixture.weights)
        ]
        source = next(iter(sources), name)
        bases = options.run_names(source)
        found = [
            _load_base(folder, base, seed, mixture.weights)
            for base, seed in zip(bases, options.seeds, strict=True)
        ]
        runs, evaluations = zip(*found, strict=True)
        same_as = None if source == name else mixture_label(source)
        mixtures.append(ComparedMixture(name, mixture, costs[name], runs, evaluations, same_as))
        results |= dict(zip(bases, evaluations, strict=True))
    require_comparable(results)
    first, *others = [run for each in mixtures for run in each.runs]
    one = first.provenance.options
    for run in others:
        other = run.provenance.options
        different = [k for k in {**one, **other} if one.get(k) != other.get(k)]
        for key in (key for key in different if key not in MAY_DIFFER):
            raise UserError(
                f"{run.root} and {first.root} differ in the option {key} ({other.get(key)} and "
                f"{one.get(key)}); compare runs that differ in their mixture and seed only"
            )
    domains = tuple(mixtures[0].results[0].domains)
    for name, result in results.items():
        if set(result.domains) != set(domains):
            raise UserError(
                f"{EVALUATION}/{name}.json has other domains than the first one; {HINT}"
            )
    perplexities = np.array(
        [[[r.domains[d].perplexity for d in domains] for r in each.results] for each in mixtures]
    )
    return MethodComparison(options, tuple(mixtures), domains, perplexities)


def mixture_label(name: str) -> str:
    """Label of the mixture ``name``; doremi-2k is "DoReMi 2k"."""
    for known in (name, name.rpartition("-")[0]):
        if known in LABELS:
            return f"{LABELS[known]} {name.removeprefix(known).removeprefix('-')}".strip()
    return name


def _load_base(
    folder: RunFolder, name: str, seed: int, weights: Mapping[str, float]
) -> tuple[TrainingRun, EvaluationResult]:
    """A finished base run trained with ``weights`` and ``seed``, and its evaluation."""
    run, result = folder.base_runs.get(name), folder.evaluations.get(name)
    place = folder.root / BASE / name
    if run is None or run.status != "finished":
        state = "does not exist" if run is None else f"is {run.status}"
        raise UserError(f"{place} {state}; {HINT}")
    if not same_weights(run.mixture, weights):
        raise UserError(
            f"{place} was trained with other weights than its mixture in {MIXTURE} has now; delete "
            f"the run and its evaluation, and {HINT}"
        )
    trained_with = run.provenance.options.get("seed")
    if trained_with != seed:
        raise UserError(f"{place} was trained with --seed {trained_with}; delete it, and {HINT}")
    path = folder.root / EVALUATION / f"{name}.json"
    if result is None:
        raise UserError(f"{path} does not exist; {HINT}")
    _require_last_checkpoint(path, result, run)
    return run, result


def _require_last_checkpoint(path: Path, result: EvaluationResult, run: TrainingRun) -> None:
    """Raise UserError unless ``result``, read from ``path``, is of the last weights of ``run``."""
    folders = checkpoint_folders(run.root)
    if not folders:
        raise UserError(
            f"{run.root} has no checkpoint to match its evaluation with; put it back, or delete "
            f"the run, and {HINT}"
        )
    checkpoint = CheckpointRecord.load(folders[-1])
    if (result.step, result.checkpoint_hash) != (run.step, checkpoint.hash):
        raise UserError(
            f"{path} is of other weights (step {result.step} of {result.checkpoint}) than "
            f"{checkpoint.root}; {HINT}"
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
    baseline, reference, count = compared.baseline, compared.reference, len(compared.domains)
    rows = {
        "average_perplexity": ("average perplexity", format_perplexity),
        "standard_deviation": ("  standard deviation across seeds", format_perplexity),
        "less_baseline": (f"  minus {baseline.label}'s, paired", "{:+.2f}".format),
        "standard_error": ("  standard error of that", "{:.2f}".format),
        "domains_better": (f"domains better than {baseline.label}", f"{{}} of {count}".format),
        "flops": ("FLOPs to obtain the mixture", lambda n: format_flops(n) if n else "0"),
        "device_seconds": ("device-seconds for that", "{:,.1f}".format),
    }
    for unit, label in UNITS.items() if reference is not None else ():
        assert reference is not None
        rows[f"{unit}_by_reference"] = (
            f"{label} / {reference.label}'s",
            lambda ratio: f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x",
        )
    summary = []
    for key, (label, form) in rows.items():
        values = [details[key] for details in compared.details.values()]
        cells = cells_of(values, form, min if key == "average_perplexity" else None)
        if key in ("less_baseline", "standard_error", "domains_better"):
            cells[compared.mixtures.index(baseline)] = MISSING
        if key in UNITS:
            cells = [
                UNKNOWN if value is None else c for value, c in zip(values, cells, strict=True)
            ]
        summary.append([label, *cells])
    weights = [each.mixture.weights for each in compared.mixtures]
    return Table.of(
        "Mixtures head to head",
        ["weight of", *(each.label for each in compared.mixtures)],
        [[d, *(format_weight(each.get(d, 0.0)) for each in weights)] for d in compared.domains],
        summary,
        notes(compared),
    )


def domain_table(compared: MethodComparison) -> Table:
    """Per domain: mean perplexity over seeds, and its standard deviation."""
    means = compared.perplexities.mean(axis=1)
    deviations = compared.perplexities.std(axis=1, ddof=1)
    return Table.of(
        "Held-out perplexity by domain",
        ["domain", *(each.label for each in compared.mixtures)],
        [
            [name, *cells_of(means[:, k], format_perplexity, min, deviations[:, k])]
            for k, name in enumerate(compared.domains)
        ],
        notes=["Mean over seeds ± standard deviation; the lowest mean of each row is marked."],
    )


def notes(compared: MethodComparison) -> list[str]:
    """Notes below the table: protocol, significance and cost accounting."""
    mixtures, baseline, seeds = compared.mixtures, compared.baseline, compared.options.seeds
    run, protocol = mixtures[0].runs[0], mixtures[0].results[0].protocol
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
        sentences.append("All of these mixtures have the same weights and show the same models.")
    else:
        verdict = "the mixtures are distinguishable"
        if not spread["is_told_apart"]:
            verdict = "the mixtures are not distinguishable: train longer, or more base models"
        sentences.append(
            "Standard deviation between mixtures, divided by that between seeds: "
            f"{spread['between_mixtures']:.2f} / {spread['between_seeds']:.2f} = "
            f"{spread['ratio']:.1f}; the threshold is {LEAST_RATIO:g}, so {verdict}."
        )
    found = compared.details
    unclear = [
        each.label
        for each in mixtures
        if (each.same_as or each.label) != (baseline.same_as or baseline.label)
        and abs(found[each.name]["less_baseline"]) <= found[each.name]["half_width_95"]
    ]
    if unclear:
        sentences.append(
            f"No significant difference from {baseline.label}: {', '.join(unclear)} (95% interval "
            f"of the paired difference, Student's t over {len(seeds)} seeds, not corrected for the "
            "number of pairs)."
        )
    sentences += [
        f"{each.label} has the weights of {each.same_as}: the same models are shown."
        for each in mixtures
        if each.same_as is not None
    ]
    sentences.append(
        "A mixture's cost includes its proxies, swarm, held-out passes, embeddings and final fit. "
        "FLOPs are counted from the models' shapes; device-seconds exclude start-up."
    )
    return sentences + [
        f"The cost of {each.label} is unknown: no cost of {', '.join(each.paid.missing)}."
        for each in mixtures
        if not each.paid.is_known
    ]


def cost_figure(compared: MethodComparison) -> Figure:
    """Average perplexity against FLOPs: a dot for each base model, a bar at each mixture's mean.

    The axis of FLOPs is logarithmic, and linear near 0. Mixtures of unknown cost are right of the
    most expensive; several of them, or several without cost, are spread out around their place.
    """
    figure = figures.new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    # None becomes NaN.
    flops = np.array([found["flops"] for found in compared.details.values()], dtype=np.float64)
    costs = flops[flops > 0] if (flops > 0).any() else np.ones(1)
    threshold, unknown = costs.min() / 10, 10 * costs.max()
    places = np.nan_to_num(flops, nan=unknown)
    for place in (0, unknown):
        (same,) = np.nonzero(places == place)
        turns = np.arange(len(same)) - (len(same) - 1) / 2
        places[same] = place * 1.3**turns if place else threshold * turns / 2
    handles = []
    for i, averages in enumerate(compared.averages):
        color, marker = figures.color_of(i), "o" if i < len(figures.COLORS) else "s"
        x = np.full(len(averages), places[i])
        handles += axes.plot(x, averages, marker, color=color, ms=4.5, ls="none")
        axes.plot(places[i], averages.mean(), "_", color=color, ms=20, mew=2)
    axes.set_xscale("symlog", linthresh=threshold, linscale=0.3)
    axes.margins(x=0.1)
    right = "; right of the line: unknown" if np.isnan(flops).any() else ""
    if right:
        axes.axvline(3 * costs.max(), color=figures.REFERENCE_COLOR, ls="--", linewidth=0.9)
    axes.set_xlabel(f"FLOPs to obtain the mixture{right}")
    axes.set_ylabel("average held-out perplexity")
    axes.grid(color=figures.GRID_COLOR)
    figures.tidy(axes)
    figures.legend_above(figure, handles, [each.label for each in compared.mixtures])
    return figure


def _write_record(compared: MethodComparison, path: Path, page: str) -> None:
    """Write date, machine, command and tables as JSON and Markdown."""
    runs = [run for each in compared.mixtures for run in each.runs]
    versions = runs[0].provenance.versions
    layout = CheckpointRecord.load(checkpoint_folders(runs[0].root)[-1]).layout
    commits = [c for c in dict.fromkeys(run.provenance.git_commit for run in runs) if c]
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    machine = {
        "device": layout["device"],
        "devices_of_a_base_run": layout["world_size"],
        "processor": models[0] if models else platform.machine(),
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


def as_json(compared: MethodComparison) -> dict[str, Any]:
    """Every figure of the comparison, unrounded."""
    spread, first, reference = compared.spread, compared.mixtures[0], compared.reference
    if spread is not None and not spread["between_seeds"]:
        spread["ratio"] = None
    run = first.runs[0]
    return {
        "seeds": list(compared.options.seeds),
        "domains": list(compared.domains),
        "baseline": compared.baseline.name,
        "reference": None if reference is None else reference.name,
        "spread": spread,
        "base_model": {"parameters": run.parameters, "steps": run.step, "tokens": run.tokens},
        "protocol": dataclasses.asdict(first.results[0].protocol),
        "mixtures": compared.details,
    }


def as_csv(compared: MethodComparison) -> str:
    """A line per mixture: its figures, the average of each seed, then weights by domain."""
    lines = []
    for (name, details), averages in zip(compared.details.items(), compared.averages, strict=True):
        line = {k: v for k, v in details.items() if isinstance(v, float | int | str)}
        for seed, average in zip(compared.options.seeds, averages, strict=True):
            line[f"average_perplexity_seed_{seed}"] = average
        weights = {f"weight:{d}": details["weights"].get(d, 0.0) for d in compared.domains}
        lines.append({"mixture": name, **line, **weights})
    return csv_text(pd.DataFrame(lines, dtype=object).fillna(""))
