"""Compare the costs of mixtures, and base models that were trained with paired seeds.

Base models with the same seed start from the same weights and sample with the same seed.
Differences between mixtures are computed seed by seed, which removes the seed's effect.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.artifacts.downstream_result import DownstreamResult, require_same_questions
from megatron_chameleon.artifacts.files import read_json, replacing, require_new, write_json
from megatron_chameleon.artifacts.provenance import Cost, machine_info
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.published import published_columns
from megatron_chameleon.report import figures, tables
from megatron_chameleon.report.cost import TRAINING_OF_MODEL, MixtureCost, ledger_of
from megatron_chameleon.report.downstream import scores
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.results import (
    HELD_OUT_NOTE,
    by_domain,
    over_seeds,
    require_same_evaluation,
    results_table,
)
from megatron_chameleon.report.run_folder import (
    BASE,
    DOWNSTREAM_SUFFIX,
    EVALUATION,
    MIXTURE,
    REPORT,
    RunFolder,
    same_weights,
)
from megatron_chameleon.report.significance import (
    LEAST_RATIO,
    Array,
    holm,
    paired_difference,
    spread_of,
)
from megatron_chameleon.report.tables import Table
from megatron_chameleon.training.options import PretrainOptions

UNITS = {"flops": "FLOPs", "device_seconds": "device-seconds"}
HALF_WIDTH = "half of its 95% interval, corrected by Holm's method"
HINT = "run examples/compare_methods.sh, which adds missing runs and results"
REFERENCES = ("chameleon", "chameleon-pretrain")
# Columns that examples/compare_methods.sh computes with other flags than the method of that name:
# proxies trained for fewer steps, and Chameleon's modes and recipes.
VARIANTS = {"doremi-2k", "doge-2k", "chameleon-finetune", "chameleon-pretrain"}
VARIANTS |= {"chameleon-paper", "chameleon-scaled"}
VARIANTS |= {"chameleon-target-pretrain", "chameleon-target-finetune", "mixmin-experts"}
# Start of the names of columns whose weights are printed in the paper, written by
# examples/baselines/manual.sh.
PRINTED = "printed-"
# Options of a base run that may differ between compared runs: paths, the compared settings, and
# options that do not change results.
MAY_DIFFER = {"run_dir", "mixture", "seed", "micro_batch_size", "compile_layers", "parallel"}
MAY_DIFFER |= {"document_attention", "dry_first_step", "log_interval", "save_interval", "overwrite"}
MAY_DIFFER |= {"checkpointing", "stopping", "validation", "target", "logging", "profiling"}
MAY_DIFFER |= {"online"}
# Each seed may fine-tune its own weights, but all mixtures of a seed must start from the same ones.
SAME_WITHIN_A_SEED = "pretrained_checkpoint"
# End of the name of an online method's column; only needed if another column has its name.
ONLINE_SUFFIX = "-online"
ONLINE = " (online)"
PAGE_TITLE = "Methods compared"


@dataclasses.dataclass(frozen=True)
class ComparedMixture:
    """A mixture, its cost, and its base models and their evaluations in the order of the seeds.

    Attributes:
        paid: cost to obtain the mixture, including the cost of its inputs.
        same_as: label of another mixture with the same weights, whose models are used here too.
    """

    name: str
    mixture: Mixture
    paid: MixtureCost
    runs: Sequence[TrainingRun]
    results: Sequence[EvaluationResult]
    same_as: str | None = None

    @property
    def label(self) -> str:
        """Label in tables and figures."""
        return mixture_label(self.name)


def validation_curve(runs: Sequence[TrainingRun]) -> dict[int, float]:
    """Tokens -> validation loss, averaged over domains and ``runs``, where all runs have one.

    Held-out domains, which a run's mixture does not have, are not in the average.
    """
    curves: list[dict[int, float]] = []
    for run in runs:
        by_domain = figures.run_curves(run.root.name, run).validation
        losses = pd.DataFrame({n: curve for n, curve in by_domain.items() if n in run.mixture})
        per_step = run.tokens // max(run.step, 1)
        curves.append(
            {
                int(step) * per_step: math.fsum(row) / len(row)
                for step, *row in losses.dropna().itertuples(name=None)
            }
        )
    common = sorted(set.intersection(*map(set, curves)))
    return {tokens: math.fsum(c[tokens] for c in curves) / len(curves) for tokens in common}


def tokens_to_reach(curve: Mapping[int, float], loss: float) -> float | None:
    """Tokens after which ``curve`` first reaches ``loss``, by linear interpolation; None if never.

    Args:
        curve: tokens -> loss, in increasing order of tokens.
        loss: the loss to reach.
    """
    before = None
    for tokens, value in curve.items():
        if value <= loss:
            if before is None:
                return float(tokens)
            return float(np.interp(-loss, [-before[1], -value], [before[0], tokens]))
        before = tokens, value
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class MethodComparison:
    """Results of m mixtures, each with s seeds, on k domains.

    Attributes:
        options: options of the comparison, with the names of the mixtures and the seeds.
        mixtures: name -> mixture, in the order of the options.
        downstream: name of a mixture -> downstream results of its base models, in the order of the
            seeds. Mixtures without a result of each seed are left out.
    """

    options: CompareMethodsOptions
    mixtures: dict[str, ComparedMixture]
    downstream: Mapping[str, Sequence[DownstreamResult]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def results(self) -> pd.DataFrame:
        """The :func:`results_table`; models that mixtures share have rows for each of them."""
        return results_table(
            (name, run.root.name, seed, result)
            for name, mixture in self.mixtures.items()
            for seed, run, result in zip(
                self.options.seeds, mixture.runs, mixture.results, strict=True
            )
        )

    @property
    def first_result(self) -> EvaluationResult:
        """An evaluation, for what all evaluations have in common."""
        return next(iter(self.mixtures.values())).results[0]

    @property
    def domains(self) -> list[str]:
        """Names of the k domains to train on, over which averages are taken."""
        return list(self.first_result.training_domains)

    @functools.cached_property
    def perplexity(self) -> pd.DataFrame:
        """Perplexity by domain (rows, held-out domains last), and mixture and seed (columns)."""
        return by_domain(self.results, "perplexity", ["mixture", "seed"])

    def _averaged(self, values: pd.DataFrame) -> Array:
        averages: Array = values.mean().to_numpy().reshape(len(self.mixtures), -1)
        return averages

    @property
    def averages(self) -> Array:
        """Perplexities [m, s], averaged over domains with equal weights, as in the paper."""
        return self._averaged(self.perplexity.loc[self.domains])

    @property
    def losses(self) -> Array:
        """Losses in nats per token [m, s], averaged over domains with equal weights."""
        return self._averaged(np.log(self.perplexity.loc[self.domains]))

    @property
    def runs(self) -> list[TrainingRun]:
        """All base runs."""
        return [run for mixture in self.mixtures.values() for run in mixture.runs]

    @property
    def labels(self) -> dict[str, str]:
        """Name -> label of the mixtures."""
        return {name: mixture.label for name, mixture in self.mixtures.items()}

    @property
    def baseline(self) -> ComparedMixture:
        """The baseline mixture, with which the perplexities of the other mixtures are compared."""
        return self.mixtures[self.options.baseline]

    @property
    def reference(self) -> ComparedMixture | None:
        """The reference mixture, whose cost divides all costs; None if it is not compared."""
        names = (self.options.reference,) if self.options.reference else REFERENCES
        return next((self.mixtures[name] for name in names if name in self.mixtures), None)

    @property
    def spread(self) -> dict[str, Any] | None:
        """:func:`spread_of` the mixtures with their own models; None if only one has models."""
        rows = [i for i, each in enumerate(self.mixtures.values()) if each.same_as is None]
        return spread_of(self.averages[rows]) if len(rows) > 1 else None

    @functools.cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies by task (rows), and mixture and seed (columns), where there are results.

        An accuracy is the mean over all numbers of shots; NaN if one is missing.
        """
        found = {
            (name, seed): result
            for name, results in self.downstream.items()
            for seed, result in zip(self.options.seeds, results, strict=True)
        }
        tasks = dict.fromkeys(task for result in found.values() for task in result.tasks)
        return scores(found, list(tasks))

    @functools.cached_property
    def details(self) -> dict[str, dict[str, Any]]:
        """Mixture name -> its unrounded metrics, keyed as in the JSON file."""
        baseline = self.options.mixtures.index(self.options.baseline)
        domains, seeds = self.domains, self.options.seeds
        means, deviations = (each.loc[domains] for each in over_seeds(self.perplexity))
        reference, found = self.reference, {}
        tests = [self._compare(values, baseline) for values in (self.averages, self.losses)]
        curves = [validation_curve(mixture.runs) for mixture in self.mixtures.values()]
        for i, mixture in enumerate(self.mixtures.values()):
            name, averages, losses = mixture.name, self.averages[i], self.losses[i]
            perplexity = self.perplexity[name]
            mean, error, half_width = paired_difference(averages, self.averages[baseline])
            (p_values, halves), (loss_p_values, loss_halves) = tests
            found[name] = {
                "label": mixture.label,
                "same_models_as": mixture.same_as,
                "weights": mixture.mixture.weights,
                "average_perplexity": averages.mean(),
                "standard_deviation": averages.std(ddof=1),
                "less_baseline": mean,
                "standard_error": error,
                "half_width_95": half_width,
                "half_width_95_holm": halves[i],
                "p_value_holm": p_values[i],
                "average_loss": losses.mean(),
                "loss_standard_deviation": losses.std(ddof=1),
                "loss_less_baseline": (losses - self.losses[baseline]).mean(),
                "loss_half_width_95_holm": loss_halves[i],
                "loss_p_value_holm": loss_p_values[i],
                **_tokens_to_reach_each_other(curves[i], curves[baseline]),
                "domains_better": int((means[name] < means[self.options.baseline]).sum()),
                **{unit: mixture.paid.amount(unit) for unit in UNITS},
                **{
                    f"{unit}_by_reference": reference and mixture.paid.ratio(reference.paid, unit)
                    for unit in UNITS
                },
                "cost_made_of": list(mixture.paid.parts),
                "cost_missing": list(mixture.paid.missing),
                "perplexity": {
                    f"seed {seed}": perplexity.loc[domains, seed].to_dict() for seed in seeds
                },
                "downstream_accuracy": {
                    f"seed {seed}": self.accuracies[name, seed].dropna().to_dict()
                    for seed in (seeds if name in self.downstream else ())
                },
                "mean_perplexity": means[name].to_dict(),
                "perplexity_standard_deviation": deviations[name].to_dict(),
            }
            if len(perplexity) > len(domains):
                held_out = perplexity.drop(index=domains)
                found[name]["held_out_perplexity"] = {
                    f"seed {seed}": held_out[seed].to_dict() for seed in seeds
                }
        return found

    def _compare(self, values: Array, baseline: int) -> tuple[Array, Array]:
        """Compare ``values`` [m, s] with those of the baseline by :func:`holm`; both results [m].

        Mixtures that share models count as one test. A mixture with the baseline's models is not
        tested.
        """
        differences = values - values[baseline]
        tested, place = np.unique(differences, axis=0, return_inverse=True)
        differ = np.flatnonzero(np.any(tested != 0, axis=1))
        p_values, halves = np.ones(len(tested)), np.zeros(len(tested))
        if len(differ):
            p_values[differ], halves[differ] = holm(tested[differ])
        return p_values[place], halves[place]


def _tokens_to_reach_each_other(
    curve: Mapping[int, float], baseline: Mapping[int, float]
) -> dict[str, float | None]:
    """Tokens for which the baseline reaches a mixture's last validation loss, and vice versa.

    A value is None if the loss is not reached, or if there are no validation losses.
    """
    if not curve or not baseline:
        return dict.fromkeys(("baseline_tokens", "tokens_to_baseline", "validated_tokens"))
    return {
        "baseline_tokens": tokens_to_reach(baseline, list(curve.values())[-1]),
        "tokens_to_baseline": tokens_to_reach(curve, list(baseline.values())[-1]),
        "validated_tokens": float(max(curve)),
    }


def compare_methods(options: CompareMethodsOptions) -> MethodComparison:
    """Compare the mixtures in ``options``, print the tables, and write them to 7-report.

    Raises:
        UserError: if a mixture, run or evaluation is missing or cannot be compared.
    """
    stem, record = options.run / REPORT / options.name, options.record
    targets = [(stem.with_suffix(".json"), (".png", ".txt", ".md", ".csv"))]
    for path, suffixes in targets + ([] if record is None else [(record, (".md",))]):
        # Replace existing files only if an earlier comparison wrote them.
        keys = read_json(path, "choose another name").keys() if path.is_file() else set()
        if not keys >= {"seeds", "mixtures"}:
            require_new([path, *map(path.with_suffix, suffixes)], "choose another name")
    compared = load_comparison(RunFolder.load(options.run), options)
    shown = [comparison_table(compared), domain_table(compared)]
    shown += [downstream_table(compared)] if compared.downstream else []
    picture = f"\n![Average perplexity against cost]({options.name}.png)\n"
    others = {".csv": as_csv(compared).encode(), ".png": figures.png(cost_figure(compared))}
    write_comparison(
        options, stem, PAGE_TITLE, shown, as_json(compared), compared.runs, others, picture
    )
    return compared


def write_comparison(
    options: CompareMethodsOptions,
    stem: Path,
    title: str,
    shown: Sequence[Table],
    content: Mapping[str, Any],
    runs: Sequence[TrainingRun],
    others: Mapping[str, bytes] = types.MappingProxyType({}),
    picture: str = "",
) -> None:
    """Print the tables of a comparison, and write its files and the record of ``--record``.

    Args:
        options: options of the comparison.
        stem: path of the files without suffix.
        title: heading of the Markdown files.
        shown: tables to print, and to write to .txt and .md.
        content: content of the .json file.
        runs: the compared runs, for the record.
        others: suffix -> content of other files.
        picture: Markdown of the figure, below the tables.
    """
    text = "\n\n\n".join(map(tables.terminal_table, shown)) + "\n"
    page = "\n\n".join(map(tables.markdown_table, shown)) + "\n"
    files = {stem.with_suffix(suffix): data for suffix, data in others.items()}
    files[stem.with_suffix(".txt")] = text.encode()
    files[stem.with_suffix(".md")] = f"# {title}\n\n{page}{picture}".encode()
    record, made = options.record, dict[str, Any]()
    if record is not None:
        made = record_of(runs, options)
        where = "\n".join(f"- {key}: {tables.markdown(str(value))}" for key, value in made.items())
        files[record.with_suffix(".md")] = f"# {title}\n\n{where}\n\n{page}".encode()
    for path, data in files.items():
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    write_json(stem.with_suffix(".json"), content)
    print(text)
    if record is not None:
        write_json(record, {**made, **content})
        print(f"recorded in {record} and {record.with_suffix('.md')}")
    suffixes = tables.listed([".md", *others, ".json"])
    print(f"written to {stem}.txt, {suffixes}", flush=True)


def load_comparison(folder: RunFolder, options: CompareMethodsOptions) -> MethodComparison:
    """Read the mixtures, runs and evaluations in ``options`` from ``folder``.

    Raises:
        UserError: if something is missing, unfinished, or cannot be compared.
    """
    if "uniform" not in folder.mixtures and folder.base_runs:
        # Base runs with --mixture uniform need no mixture file.
        uniform = Mixture.uniform(list(next(iter(folder.base_runs.values())).mixture))
        path = folder.root / MIXTURE / "uniform.json"
        folder = dataclasses.replace(
            folder,
            mixtures={"uniform": uniform, **folder.mixtures},
            paths={f"{MIXTURE}/uniform": path, **folder.paths},
        )
    costs, mixtures = ledger_of(folder).mixtures, dict[str, ComparedMixture]()
    for name in options.mixtures:
        if method := _online_method_of(folder, name, options):
            mixtures[name] = _load_online(folder, name, method, options)
            continue
        if name not in folder.mixtures:
            raise UserError(f"{folder.root / MIXTURE / name}.json does not exist; {HINT}")
        mixture = folder.mixtures[name]
        # If a mixture has no base runs, use those of another mixture with the same weights.
        sources = (
            other
            for other in (name, *options.mixtures)
            if other in folder.mixtures
            and all(run in folder.base_runs for run in options.run_names(other))
            and same_weights(folder.mixtures[other].weights, mixture.weights)
        )
        source = next(sources, name)
        runs, results = _load_bases(folder, source, options)
        for run in runs:
            if not same_weights(run.mixture, mixture.weights):
                if run.limited:
                    raise UserError(
                        f"{run.root} was trained with --max-repetition-action redistribute, which "
                        f"changed the weights; compare the mixture within its limits "
                        "(compute_mixture --max-epochs)"
                    )
                raise UserError(
                    f"{run.root} was trained with other weights than those of its mixture in "
                    f"{MIXTURE}; delete the run and its evaluation, and {HINT}"
                )
        same_as = None if source == name else mixture_label(source)
        paid = costs[name]
        if options.existing_model:
            missing = tuple(part for part in paid.missing if part != TRAINING_OF_MODEL)
            paid = dataclasses.replace(paid, missing=missing)
        mixtures[name] = ComparedMixture(name, mixture, paid, runs, results, same_as)
    compared = [
        (same_seed, run, result)
        for each in mixtures.values()
        for same_seed, run, result in zip(
            next(iter(mixtures.values())).runs, each.runs, each.results, strict=True
        )
    ]
    require_same_evaluation({run.root.name: result for _, run, result in compared})
    for same_seed, run, _ in compared:
        _require_same_options(run, compared[0][1], same_seed)
    return MethodComparison(options, mixtures, _load_downstream(folder, mixtures))


@functools.cache
def _default_options() -> dict[str, Any]:
    """Today's default of every option of a base run that has one, as in its record."""
    return {
        field.name: json_values(field.default_factory())
        if field.default_factory is not dataclasses.MISSING
        else field.default
        for field in dataclasses.fields(PretrainOptions)
        if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }


def options_of(run: TrainingRun) -> dict[str, Any]:
    """Recorded options of ``run``; one that was added since then has its default of today."""

    def merged(recorded: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        return defaults | {
            name: merged(value, defaults[name])
            if isinstance(value, dict) and isinstance(defaults.get(name), dict)
            else value
            for name, value in recorded.items()
        }

    return merged(run.provenance.options, _default_options())


def _require_same_options(run: TrainingRun, first: TrainingRun, same_seed: TrainingRun) -> None:
    """Raise UserError if ``run`` differs from ``first`` in an option that is not compared.

    ``same_seed`` is the run of the first mixture with the seed of ``run``.
    """
    ours = options_of(run)
    for key in sorted((options_of(first).keys() | ours.keys()) - MAY_DIFFER):
        other = same_seed if key == SAME_WITHIN_A_SEED else first
        one, two = ours.get(key), options_of(other).get(key)
        if one != two:
            raise UserError(
                f"{run.root} and {other.root} differ in the option {key} ({one} and {two}); "
                "compare runs that differ only in mixture and seed"
            )


def _load_downstream(
    folder: RunFolder, mixtures: Mapping[str, ComparedMixture]
) -> dict[str, list[DownstreamResult]]:
    """Load the downstream results of the mixtures that have one for each seed.

    Raises:
        UserError: if a result is not of the last checkpoint, or results cannot be compared.
    """
    found: dict[str, list[DownstreamResult]] = {}
    by_run: dict[str, DownstreamResult] = {}
    for name, mixture in mixtures.items():
        results = [(f"{run.root.name}{DOWNSTREAM_SUFFIX}", run) for run in mixture.runs]
        if all(result in folder.downstream for result, _ in results):
            for result, run in results:
                by_run[result] = folder.downstream[result]
                path = folder.root / EVALUATION / f"{result}.json"
                _require_last_checkpoint(path, by_run[result], run)
            found[name] = [by_run[result] for result, _ in results]
    if by_run:
        require_same_questions(by_run)
    return found


def mixture_label(name: str) -> str:
    """Label of the mixture ``name``, such as "DoReMi 2k" for doremi-2k."""
    if name.startswith(PRINTED):
        return f"{mixture_label(name.removeprefix(PRINTED))} (printed)"
    if name.endswith(ONLINE_SUFFIX):
        return f"{mixture_label(name.removesuffix(ONLINE_SUFFIX)).removesuffix(ONLINE)}{ONLINE}"
    for known in (name, name.rpartition("-")[0]):
        if label := tables.METHOD_LABELS.get(known):
            return f"{label} {name.removeprefix(known).removeprefix('-')}".strip()
    return name


def _online_method_of(folder: RunFolder, name: str, options: CompareMethodsOptions) -> str | None:
    """The value of ``--online`` of a column's base runs; None if the column has a mixture file.

    Raises:
        UserError: if the column has the name of another method.
    """
    if name in folder.mixtures:
        return None
    runs = (folder.base_runs.get(run) for run in options.run_names(name))
    found = (method for run in runs if run and (method := _trained_online(run)))
    if (method := next(found, None)) and method != name.removesuffix(ONLINE_SUFFIX):
        raise UserError(
            f"{folder.root / BASE / name}-seed* was trained with --online {method}; delete it, and "
            f"{HINT}"
        )
    return method


def _trained_online(run: TrainingRun) -> str | None:
    """The value of ``--online`` of a run."""
    method: str | None = (run.provenance.options.get("online") or {}).get("online")
    return method


def _load_online(
    folder: RunFolder,
    name: str,
    method: str,
    options: CompareMethodsOptions,
) -> ComparedMixture:
    """Load the base runs of an online method, and their evaluations.

    The column's weights are the mean shares of the sampled tokens. The method's cost is that of its
    own passes: the FLOPs of a run beyond those of the baseline's run with the same seed, and the
    time of the updates of the mixture, averaged over seeds.
    """
    runs, results = _load_bases(folder, name, options, method)
    costs: list[tuple[float, float]] = []
    for run, other in zip(runs, options.run_names(options.baseline), strict=True):
        # An online method may follow the target, which is only measured with other mixtures.
        if options_of(run)["target"] != options_of(runs[0])["target"]:
            raise UserError(
                f"{run.root} and {runs[0].root} differ in the option target; compare runs that "
                "differ only in mixture and seed"
            )
        baseline = folder.base_runs.get(other)
        extra = run.cost.flops - (baseline.cost.flops if baseline else run.cost.flops)
        seconds = math.fsum(
            (line.get("phase_seconds") or {}).get("mixture", 0.0) for line in run.metrics()
        )
        costs.append((max(extra, 0.0), seconds * run.cost.num_devices))
    flops, seconds = (math.fsum(values) / len(costs) for values in zip(*costs, strict=True))
    shares = pd.DataFrame(
        [{domain: t.actual / run.tokens for domain, t in run.domain_tokens.items()} for run in runs]
    ).mean()
    mixture = Mixture(dict(shares), method=f"{method}{ONLINE_SUFFIX}")
    paid = MixtureCost(mixture, {f"{BASE}/{name}": Cost(flops, seconds, seconds, 1)})
    return ComparedMixture(name, mixture, paid, runs, results)


def _load_bases(
    folder: RunFolder, name: str, options: CompareMethodsOptions, online: str | None = None
) -> tuple[list[TrainingRun], list[EvaluationResult]]:
    """Load the base runs of a mixture, and their evaluations, in the order of seeds."""
    pairs = [
        _load_base(folder, base, seed, online)
        for base, seed in zip(options.run_names(name), options.seeds, strict=True)
    ]
    return [run for run, _ in pairs], [result for _, result in pairs]


def _load_base(
    folder: RunFolder, name: str, seed: int, online: str | None = None
) -> tuple[TrainingRun, EvaluationResult]:
    """Load a finished base run, trained with ``seed`` and ``online``, and its evaluation."""
    run, result = folder.base_runs.get(name), folder.evaluations.get(name)
    place, path = folder.root / BASE / name, folder.root / EVALUATION / f"{name}.json"
    if run is None or run.status != "finished":
        raise UserError(f"{place} {'is missing' if run is None else f'is {run.status}'}; {HINT}")
    if (trained_online := _trained_online(run)) != online:
        raise UserError(
            f"{place} was trained with {trained_online or 'no'} --online method; delete it, and "
            f"{HINT}"
        )
    if (trained_with := run.provenance.options.get("seed")) != seed:
        raise UserError(f"{place} was trained with --seed {trained_with}; delete it, and {HINT}")
    if result is None:
        raise UserError(f"{path} does not exist; {HINT}")
    _require_last_checkpoint(path, result, run)
    return run, result


def _require_last_checkpoint(
    path: Path, result: EvaluationResult | DownstreamResult, run: TrainingRun
) -> None:
    """Raise UserError if ``result`` does not evaluate the last checkpoint of ``run``."""
    folders = checkpoint_folders(run.root)
    if not folders:
        raise UserError(f"{run.root} has no checkpoint; restore it, or delete the run, and {HINT}")
    if (result.step, result.checkpoint_hash) != (run.step, CheckpointRecord.load(folders[-1]).hash):
        raise UserError(
            f"{path} evaluates other weights (step {result.step} of {result.checkpoint}) than "
            f"{folders[-1]}; {HINT}"
        )


def require_choice(options: CompareMethodsOptions, methods: Collection[str]) -> None:
    """Raise UserError for a mixture that is neither one of ``methods`` nor an existing file.

    Columns of the paper's tables, such as printed-human, are known as well.
    """
    printed = {f"{PRINTED}{column.partition('/')[2]}" for column in published_columns()}
    known = {*methods, *VARIANTS, *printed}
    for name in options.mixtures:
        path = options.run / MIXTURE / f"{name}.json"
        if name not in known and not path.is_file():
            raise UserError(
                f"--mixtures {name}: unknown method, and {path} does not exist; "
                f"choose from {', '.join(sorted(known - printed))}, or {PRINTED}COLUMN"
            )


def require_results(options: CompareMethodsOptions) -> None:
    """Raise UserError for a base run whose last checkpoint lacks a result that --check names."""
    is_downstream = options.check == "downstream"
    kind = DownstreamResult if is_downstream else EvaluationResult
    suffix = DOWNSTREAM_SUFFIX if is_downstream else ""
    for base in itertools.chain.from_iterable(map(options.run_names, options.mixtures)):
        path = options.run / EVALUATION / f"{base}{suffix}.json"
        run = TrainingRun.load(options.run / BASE / base)
        _require_last_checkpoint(path, kind.load(path), run)


def comparison_table(compared: MethodComparison) -> Table:
    """Table with a column per mixture: weights, average perplexity over seeds and cost."""
    baseline, reference, count = compared.baseline, compared.reference, len(compared.domains)
    rows = {
        "average_perplexity": ("average perplexity", tables.format_perplexity),
        "standard_deviation": ("  standard deviation across seeds", tables.format_perplexity),
        "less_baseline": (f"  difference from {baseline.label}, paired by seed", "{:+.2f}".format),
        "half_width_95_holm": (f"  {HALF_WIDTH}", "{:.2f}".format),
        "average_loss": ("average loss", tables.four_decimals),
        "loss_standard_deviation": ("  standard deviation across seeds", tables.four_decimals),
        "loss_less_baseline": (
            f"  difference from {baseline.label}, paired by seed",
            "{:+.4f}".format,
        ),
        "loss_half_width_95_holm": (f"  {HALF_WIDTH}", tables.four_decimals),
        "domains_better": (f"domains better than {baseline.label}", f"{{}} of {count}".format),
        "flops": ("FLOPs to obtain the mixture", lambda n: tables.format_flops(n) if n else "0"),
        "device_seconds": ("device-seconds to obtain the mixture", "{:,.1f}".format),
    }
    if reference is not None:
        ratio = "{:.2f}x".format
        rows |= {
            f"{key}_by_reference": (f"{unit} / {reference.label}'s", ratio)
            for key, unit in UNITS.items()
        }
    summary = []
    for key, (label, form) in rows.items():
        values = {name: details[key] for name, details in compared.details.items()}
        if "baseline" in key or "half_width" in key or key == "domains_better":
            values[baseline.name] = None
        best = min if key in ("average_perplexity", "average_loss") else None
        cells = tables.cells_of(values.values(), form, best)
        if key in UNITS:
            cells = [tables.UNKNOWN if cell == tables.MISSING else cell for cell in cells]
        summary.append([label, *cells])
    for key, label in (
        ("baseline_tokens", f"tokens for which {baseline.label} has the same validation loss"),
        ("tokens_to_baseline", f"tokens until the last validation loss of {baseline.label}"),
    ):
        cells = [
            _tokens_cell(each[key], each["validated_tokens"]) for each in compared.details.values()
        ]
        if set(cells) != {tables.MISSING}:
            summary.append([label, *cells])
    weights = {each.label: each.mixture.weights for each in compared.mixtures.values()}
    shares = pd.DataFrame(weights, compared.domains).fillna(0.0)
    texts = tables.formatted(shares, tables.four_decimals)
    return Table.by_row("Mixtures head to head", "weight of", texts, summary, notes(compared))


def _tokens_cell(tokens: float | None, validated: float | None) -> str:
    """Format a number of tokens, or that more tokens than the validated ones are needed."""
    if validated is None:
        return tables.MISSING
    return f"> {validated:,.0f}" if tokens is None else f"{tokens:,.0f}"


def domain_table(compared: MethodComparison) -> Table:
    """Table of every domain's mean perplexity over seeds, with its standard deviation.

    Domains that the corpus holds out from training come last, and are marked.
    """
    first, labels = compared.first_result, compared.labels
    means, deviations = (
        each.rename(index=first.label, columns=labels) for each in over_seeds(compared.perplexity)
    )
    texts = tables.formatted(means, tables.format_perplexity, min, deviations)
    notes = ["Mean over seeds ± standard deviation; the lowest mean of each row is marked."]
    if first.held_out:
        notes.append(HELD_OUT_NOTE)
    return Table.by_row("Held-out perplexity by domain", "domain", texts, notes=notes)


def downstream_table(compared: MethodComparison) -> Table:
    """Table of every task's mean accuracy over seeds, with its standard deviation.

    The columns are the mixtures with downstream results of every seed. The averages are over the
    tasks that all of these results have with every number of shots.
    """
    accuracies, labels = 100 * compared.accuracies, compared.labels
    complete = accuracies.dropna().index
    accuracies.loc["average"] = accuracies.loc[complete].mean()
    means, deviations = (each.rename(columns=labels) for each in over_seeds(accuracies))
    texts = tables.formatted(means, "{:.1f}".format, max, deviations)
    summary = [["average", *texts.loc["average"]]]
    baseline = compared.baseline.label
    if baseline in means:
        counts = tables.counts_better(means.loc[complete], baseline, max)
        summary.append([f"tasks better than {baseline}", *counts])
    protocol = next(iter(compared.downstream.values()))[0].protocol
    questions = "all questions" if protocol.limit is None else f"{protocol.limit} questions a task"
    shots = tables.listed([str(number) for number in protocol.shots])
    notes = [
        f"Mean over seeds ± standard deviation; the highest mean of each row is marked. lm-eval "
        f"{protocol.lm_eval_version}, {questions}, mean over {shots} solved examples. The average "
        f"is over the {len(complete)} of {len(means) - 1} tasks that all models have."
    ]
    absent = [label for name, label in labels.items() if name not in compared.downstream]
    if absent:
        notes.append(f"Without downstream results of every seed: {', '.join(absent)}.")
    title = "Downstream accuracy (%)"
    return Table.by_row(title, "task", texts.drop(index="average"), summary, notes)


def notes(compared: MethodComparison) -> list[str]:
    """Notes below the table: protocol, significance and cost accounting."""
    mixtures, baseline = list(compared.mixtures.values()), compared.baseline
    run, protocol = mixtures[0].runs[0], compared.first_result.protocol
    costs = [each.cost for mixture in mixtures for each in mixture.runs]
    flops = math.fsum(cost.flops for cost in costs) / len(costs)
    seconds = math.fsum(cost.device_seconds for cost in costs) / len(costs)
    seeds = compared.options.seeds
    sentences = [
        f"Each mixture was computed once and trains models of {run.parameters:,} parameters for "
        f"{run.step:,} steps ({run.tokens:,} tokens) with {len(seeds)} seeds "
        f"({', '.join(map(str, seeds))}); models of one seed start from the same weights and "
        f"sample with the same seed. Perplexity on {protocol.describe()}, averaged over domains, "
        "all with the same weight.",
        f"Training a base model took {tables.format_flops(flops)} FLOPs and "
        f"{tables.format_hours(seconds)} device-hours, on average.",
    ]
    spread = compared.spread
    if spread is not None:
        verdict = "the mixtures are distinguishable"
        if not spread["are_distinguishable"]:
            verdict = "the mixtures are not distinguishable; train longer, or use more seeds"
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
        and found[each.name]["p_value_holm"] > 0.05
    ]
    if unclear:
        sentences.append(
            f"No significant difference of perplexity from {baseline.label}: {', '.join(unclear)} "
            f"(95% interval of the paired difference, Student's t over {len(seeds)} seeds, "
            "corrected for the number of mixtures by Holm's method)."
        )
    if any(each["validated_tokens"] for each in found.values()):
        sentences.append(
            "Tokens for the same loss are interpolated on the validation curves, averaged over "
            "domains and seeds. The learning rate decays over the whole run, so a run of that many "
            "tokens alone would reach a lower loss."
        )
    averages = dict(zip(compared.mixtures, compared.averages, strict=True))
    ranked = sorted(
        (each for each in mixtures if each.same_as is None),
        key=lambda each: found[each.name]["average_perplexity"],
    )
    # Also test pairs, since a single outlier can make the ratio over all mixtures large.
    for better, worse in itertools.pairwise(ranked):
        mean, _, half_width = paired_difference(averages[worse.name], averages[better.name])
        is_listed = (baseline.same_as or baseline.label) in (better.label, worse.label)
        if mean <= half_width and not is_listed:
            sentences.append(
                f"No significant difference between {better.label} and {worse.label} (95% interval "
                "of the paired difference, without correction)."
            )
    sentences.append(
        "A mixture's cost includes its proxies, swarm, held-out passes, embeddings and final fit. "
        "FLOPs are counted from the models' shapes; device-seconds exclude start-up."
    )
    if compared.options.existing_model:
        sentences.append(
            "The model that embeds the domains existed before; its training is not included."
        )
    for each in mixtures:
        if each.same_as is not None:
            sentences.append(
                f"{each.label} has the same weights as {each.same_as}, so both columns show the "
                "same models."
            )
        if not each.paid.is_known:
            missing = ", ".join(each.paid.missing)
            sentences.append(
                f"The cost of {each.label} is unknown: no cost is recorded for {missing}."
            )
    return sentences


def cost_figure(compared: MethodComparison) -> Figure:
    """Plot average perplexity against FLOPs: a dot per base model, a bar at each mixture's mean.

    The FLOPs axis is logarithmic, and linear near 0. Mixtures of unknown cost appear in the legend
    only.
    """
    figure = figures.new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    handles, labels = [], []
    mixtures = list(compared.mixtures.values())
    for i, (mixture, averages) in enumerate(zip(mixtures, compared.averages, strict=True)):
        color, marker = figures.color_of(i), "o" if i < len(figures.COLORS) else "s"
        flops = mixture.paid.amount("flops")
        x = math.nan if flops is None else flops
        handles += axes.plot([x] * len(averages), averages, marker, color=color, ms=4.5, ls="none")
        labels.append(mixture.label if flops is not None else f"{mixture.label} (unknown cost)")
        axes.plot(x, averages.mean(), "_", color=color, ms=20, mew=2)
    costs = [flops for each in mixtures if (flops := each.paid.amount("flops"))]
    axes.set_xscale("symlog", linthresh=min(costs, default=1.0) / 10, linscale=0.3)
    axes.margins(x=0.1)
    axes.set_xlabel("FLOPs to obtain the mixture")
    axes.set_ylabel("average held-out perplexity")
    figures.tidy(axes)
    figures.legend_above(figure, handles, labels)
    return figure


def record_of(runs: Sequence[TrainingRun], options: CompareMethodsOptions) -> dict[str, Any]:
    """Date, machine, software versions and command of the compared runs."""
    layout = CheckpointRecord.load(checkpoint_folders(runs[0].root)[-1]).layout
    commits = dict.fromkeys(run.provenance.git_commit for run in runs)
    seconds = options.wall_seconds
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": layout["device"],
            "devices_of_a_base_run": layout["world_size"],
            **machine_info(),
        },
        "versions": runs[0].provenance.versions,
        "git_commits": [commit for commit in commits if commit],
        "command": options.command,
        **({} if seconds is None else {"wall_seconds": seconds}),
    }


def as_json(compared: MethodComparison) -> dict[str, Any]:
    """All figures of the comparison, unrounded."""
    spread, reference = compared.spread, compared.reference
    if spread is not None and not spread["between_seeds"]:
        spread = {**spread, "ratio": None}
    run = compared.runs[0]
    return {
        "seeds": list(compared.options.seeds),
        "domains": compared.domains,
        "baseline": compared.baseline.name,
        "reference": None if reference is None else reference.name,
        "spread": spread,
        "base_model": {"parameters": run.parameters, "steps": run.step, "tokens": run.tokens},
        "protocol": dataclasses.asdict(compared.first_result.protocol),
        "mixtures": compared.details,
    }


def as_csv(compared: MethodComparison) -> str:
    """CSV with a line per mixture: metrics, average perplexity per seed, and domain weights."""
    lines = []
    for (name, details), averages in zip(compared.details.items(), compared.averages, strict=True):
        line = {k: v for k, v in details.items() if isinstance(v, float | int | str)}
        for seed, average in zip(compared.options.seeds, averages, strict=True):
            line[f"average_perplexity_seed_{seed}"] = average
        weights = {f"weight:{d}": details["weights"].get(d, 0.0) for d in compared.domains}
        lines.append({"mixture": name, **line, **weights})
    return tables.csv_text(pd.DataFrame(lines, dtype=object).fillna(""))
