"""Methods that fit losses over mixtures: obtain runs, fit, cross-validate, write the mixture.

The runs are the members of swarms, or tables of existing runs (--ratios, --metrics).
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    Mixture,
    MixtureWarning,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, matched, read_mixture_runs
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.output import (
    align_columns,
    cost_totals,
    epoch_limit,
    format_names,
    format_weight,
    parse_share,
    write_and_print,
)
from megatron_chameleon.methods.proxy import resolve_work_dir
from megatron_chameleon.methods.swarm.options import FitOptions
from megatron_chameleon.methods.swarm.swarm import SwarmResult, train_swarm
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    Fit,
    FitQuality,
    Predict,
    fit_linear,
    held_out_predictions,
    quality_of,
    reach_of,
)
from megatron_chameleon.mixture.regmix import SamplingRule, sample_mixtures
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.progress import progress_bar

SECONDS_WITHOUT_BAR = 2.0
# A domain sampled in fewer runs than this is named in a warning: its effect is hardly known.
MIN_RUNS_PER_DOMAIN = 5
# Metrics of the target whose magnitudes differ by more than this factor are named in a warning. The
# losses of one model on several domains differ by less.
MAX_METRIC_RATIO = 5.0
# A domain needs this many held-out tokens: one to predict, and one as its context.
MIN_HELD_OUT_TOKENS = 2
Options = TypeVar("Options", bound=FitOptions)


@dataclasses.dataclass(frozen=True, eq=False)
class FitRuns:
    """Runs on mixtures of the corpus's domains, and where they come from.

    Attributes:
        table: mixtures and losses, without runs that diverged; its domains are the corpus's.
        origin: description of the source of the runs, printed.
        parameters: description of the source of the runs, for the mixture file.
        inputs: name of each file read -> its hash.
        cost: cost of the runs; None if unknown.
        made_from: folders of the swarms.
    """

    table: MixtureRuns
    origin: str
    parameters: dict[str, object]
    inputs: dict[str, str]
    cost: Cost | None
    made_from: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A fit to runs.

    Attributes:
        heading: the line above the table.
        weights: [k] mixture with the lowest predicted loss, before the epoch limit.
        predict: mixtures [n, k] -> losses [n, m].
        refit: repeats the fit on mixtures [n, k] and losses [n, m] of a subset.
        folds: folds of the cross-validation: positions of the held-out runs.
        parameters: parameters of the method, for the mixture file.
        remedy: advice for a poor fit.
        closing: lines under the table.
    """

    heading: str
    weights: Array
    predict: Predict
    refit: Fit
    folds: list[Array]
    parameters: dict[str, Any]
    remedy: str
    closing: tuple[str, ...] = ()


class FitMethod(abc.ABC, Generic[Options]):
    """A method that fits the losses of runs; :meth:`compute` is its ``--method``."""

    name: ClassVar[str]
    # Folder of a swarm in --work-dir; {} stands for its model size.
    swarm_folder: ClassVar[str] = "swarm"

    def __init__(self, options: Options) -> None:
        self.options, self.corpus = options, Corpus.load(options.corpus)

    @abc.abstractmethod
    def check_number_of_runs(self, count: int) -> None:
        """Raise UserError for too few runs to fit."""

    @abc.abstractmethod
    def fit(self, table: MixtureRuns, shares: Array) -> Fitted:
        """Fit the runs; minimize the weighted mean of their losses, with weights ``shares`` [m]."""

    @property
    def model_sizes(self) -> Sequence[str]:
        """Model sizes of the proxies; one swarm is trained for each."""
        return [self.options.swarm.model_size]

    def losses_to_fit(
        self, swarms: Mapping[str, SwarmResult]
    ) -> tuple[Array, list[str], dict[str, Any]]:
        """Losses of the members to fit.

        Args:
            swarms: model size -> its swarm, all on the same n mixtures.

        Returns:
            Losses [n, k], NaN where a member of any size diverged; lines for the user; parameters
            for the mixture file.
        """
        (swarm,) = swarms.values()
        return swarm.losses[:, -1], [], {}

    def compute(self) -> bool:
        """Train or read the runs, fit them, write the mixture. Every rank calls this.

        Returns:
            Whether there is a mixture, the same on every rank; False after a stop request.

        Raises:
            UserError: for a mistake in the options or in the files that they name, if possible
                before training.
        """
        options, corpus = self.options, self.corpus
        is_main = int(os.environ.get("RANK", "0")) == 0
        if len(corpus.names) < 2:
            raise UserError(f"{corpus.root} has only one domain; add another")
        epoch_limit(options, corpus, corpus.names).check()
        check_output(options.output, Mixture.KIND)
        if options.ratios is not None and options.metrics is not None:
            if is_main:
                runs = existing_runs(options.ratios, options.metrics, corpus)
                warn_mixed_scales(options.target, runs.table, str(options.metrics))
                self.fit_and_write(runs)
            return True
        check_target(options.target, corpus)
        self.check_number_of_runs(options.num_proxies)
        trained = self.train()
        if trained is not None and is_main:
            self.fit_and_write(trained)
        return trained is not None

    def train(self) -> FitRuns | None:
        """Train the swarms; None after a stop request. Every rank calls this."""
        options, swarms, flops = self.options, dict[Path, SwarmResult](), 0.0
        work_dir = resolve_work_dir(options.output, options.work_dir)
        mixtures = mixtures_to_train(options, self.corpus)
        for size in self.model_sizes:
            folder = work_dir / self.swarm_folder.format(size)
            settings = dataclasses.replace(options.swarm, model_size=size)
            result = train_swarm(settings, self.corpus, mixtures, folder)
            if result is None:
                return None
            swarms[folder] = result
            tokens = settings.train_iters * settings.global_batch_size * settings.seq_length
            flops += paper_flops(size, trained_tokens=options.num_proxies * tokens)
        by_size = dict(zip(self.model_sizes, swarms.values(), strict=True))
        losses, lines, parameters = self.losses_to_fit(by_size)
        runs = swarm_runs(swarms, losses, flops)
        return dataclasses.replace(
            runs,
            origin="\n".join([runs.origin, *lines]),
            parameters={**runs.parameters, **parameters},
        )

    def fit_and_write(self, runs: FitRuns) -> None:
        """Fit the runs, cross-validate this fit and a linear baseline, and write the mixture."""
        stopwatch, options, table = Stopwatch(), self.options, runs.table
        names, count = list(self.corpus.names), len(runs.table.keys)
        self.check_number_of_runs(count)
        shares = target_shares(options.target, table.metrics)
        fitted = self.fit(table, shares)
        folds = fitted.folds
        with progress_bar(
            len(folds), " folds", "cross-validating", delay=SECONDS_WITHOUT_BAR
        ) as bar:

            def refit(mixtures: Array, losses: Array) -> Predict:
                bar.update()
                return fitted.refit(mixtures, losses)

            held_out, linear = (
                held_out_predictions(fit, table.mixtures, table.losses, folds)
                for fit in (refit, fit_linear)
            )
        one_by_one = len(folds) == count
        procedure = "leave one out" if one_by_one else f"{len(folds)}-fold cross-validation"
        quality = CrossValidation.of(held_out, linear, table.losses, shares, procedure)
        fields = epoch_limit(options, self.corpus, names).mixture_fields(fitted.weights)
        weights = np.array([fields["weights"][name] for name in names])
        predicted = fitted.predict(weights[None])[0]
        reach = reach_of(weights, table.mixtures)
        outside = [names[position] for position in reach.outside]
        nearest = table.keys[reach.nearest]
        if reach.extrapolates:
            where = f"; no run had such weights of {format_names(outside)}" if outside else ""
            warnings.warn(
                "the mixture is far from the trained ones: it differs from the nearest run, "
                f"{nearest}, in {reach.distance:.0%} of the tokens{where}; its predicted losses "
                "are extrapolated",
                MixtureWarning,
                stacklevel=2,
            )
        spent = stopwatch.cost()
        if runs.cost is None:
            cost, of_what = spent, "the fit alone (that of the runs is unknown)"
        else:
            cost, of_what = runs.cost + spent, "all"
        mixture = Mixture(
            method=self.name,
            parameters={
                **fitted.parameters,
                "target_shares": _by_name(table.metrics, shares),
                "predicted_losses": _by_name(table.metrics, predicted),
                "fit": quality.parameters(table.metrics),
                "reach": {
                    "nearest_run": nearest,
                    "distance": reach.distance,
                    "usual_distance": reach.usual,
                    "outside_range": outside,
                    "extrapolates": reach.extrapolates,
                },
                "made_from": [
                    os.path.relpath(swarm, options.output.parent) for swarm in runs.made_from
                ],
                **({} if runs.cost is None else {"total_cost": cost_totals(cost)}),
                **runs.parameters,
            },
            provenance=provenance(options, {"corpus": self.corpus.hash, **runs.inputs}),
            cost=spent,
            **fields,
        )
        write_and_print(
            mixture,
            options,
            f"{fitted.heading}\nfitted to {runs.origin}",
            *fitted.closing,
            *quality.lines(table.metrics, shares, fitted.remedy),
            f"predicted target {float(predicted @ shares):.4f}, best of the runs "
            f"{float((table.losses @ shares).min()):.4f}; distance to the nearest run, {nearest}: "
            f"{format_weight(reach.distance)} of the tokens (between runs: "
            f"{format_weight(reach.usual)})",
            f"cost of {of_what}: {cost.flops:.2e} FLOPs, {cost.device_seconds:,.1f} device seconds",
        )


def token_shares(corpus: Corpus) -> Array:
    """[k] share of each domain in the training tokens.

    Raises:
        UserError: if there are none.
    """
    tokens = np.array(list(corpus.train_tokens.values()), np.float64)
    if tokens.sum() <= 0:
        raise UserError(f"{corpus.root} has no training tokens; preprocess text into it")
    shares: Array = tokens / tokens.sum()
    return shares


def mixtures_to_train(options: FitOptions, corpus: Corpus) -> Array:
    """Sample the proxies' mixtures [n, k]; warn of domains that few of them contain.

    Raises:
        UserError: if the sampling options do not allow that many.
    """
    count, shares = options.num_proxies, token_shares(corpus)
    rule = dict(vars(options.sampling))
    seed = rule.pop("mixture_seed")
    try:
        mixtures = sample_mixtures(shares, count, seed, SamplingRule(**rule))
    except ValueError as error:
        raise UserError(f"--num-proxies {count} and the mixture sampling flags: {error}") from error
    if int(os.environ.get("RANK", "0")) == 0:
        present = np.flatnonzero(shares)
        warn_rare_domains(
            [corpus.names[position] for position in present],
            mixtures[:, present],
            f"the mixtures of {count} proxies",
            "; lower --smallest-weight, or raise --max-upweighting or --num-proxies",
        )
    return mixtures


def existing_runs(ratios: Path, metrics: Path, corpus: Corpus) -> FitRuns:
    """Read runs from the user's tables, and map their columns to the domains of ``corpus``.

    Metrics that match a domain get its name; others, such as tasks, keep theirs. Renamed columns
    are reported.

    Raises:
        UserError: for tables that cannot be read, or a domain that the corpus does not have.
    """
    read = read_mixture_runs(ratios, metrics)
    names = matched(read.domains, corpus.names)
    unknown = [name for name in read.domains if name not in names]
    if unknown:
        raise UserError(
            f"{ratios}: unknown domain '{unknown[0]}'; {corpus.root} has "
            f"{format_names(corpus.names)}: rename the column"
        )
    mixtures = np.zeros((len(read.keys), len(corpus.names)))
    mixtures[:, [corpus.names.index(names[name]) for name in read.domains]] = read.mixtures
    warn_rare_domains(corpus.names, mixtures, str(ratios))
    matches = matched(read.metrics, corpus.names)
    table = dataclasses.replace(
        read,
        domains=list(corpus.names),
        mixtures=mixtures,
        metrics=[matches.get(metric, metric) for metric in read.metrics],
    )
    pairs = {
        "ratios": zip(read.domain_columns, map(names.__getitem__, read.domains), strict=True),
        "metrics": zip(read.metric_columns, table.metrics, strict=True),
    }
    renamed = {key: {old: new for old, new in each if old != new} for key, each in pairs.items()}
    origin = f"{len(read.keys)} runs of {ratios} and {metrics}"
    changes = [f"{old} -> {new}" for each in renamed.values() for old, new in each.items()]
    if changes:
        origin = f"{origin}\ncolumns: {format_names(changes)}"
    return FitRuns(
        table,
        origin,
        parameters={
            "runs": len(read.keys),
            "ratios": str(ratios),
            "metrics": str(metrics),
            "renamed_columns": renamed,
            "unknown_costs": [f"the runs of {ratios}"],
        },
        inputs={"ratios": sha256_of_files(ratios), "metrics": sha256_of_files(metrics)},
        cost=None,
    )


def swarm_runs(swarms: Mapping[Path, SwarmResult], losses: Array, paper_flops: float) -> FitRuns:
    """The members that did not diverge in any swarm.

    Args:
        swarms: folder -> swarm, all of them trained on the same mixtures.
        losses: [n, k] losses to fit: measured after a step, or extrapolated.
        paper_flops: FLOPs of the swarms, counted as in the tables of the Chameleon paper.

    Raises:
        UserError: if all members diverged, or no domain has held-out text.
    """
    folders = list(swarms)
    result = dataclasses.replace(
        swarms[folders[0]],
        diverged=sorted({number for swarm in swarms.values() for number in swarm.diverged}),
        cost=sum((swarm.cost for swarm in swarms.values()), Cost()),
    )
    count, table = len(result.mixtures), result.runs(losses)
    origin = f"{len(table.keys)} proxies of {' and '.join(map(str, folders))}"
    if not table.metrics:
        raise UserError(
            f"{origin}: no finite loss, since all {count} diverged or no domain has held-out text; "
            "lower --lr or raise --lr-warmup-iters, and choose another --work-dir"
        )
    if result.diverged:
        warnings.warn(
            f"{len(result.diverged)} of {count} proxies diverged and are left out of the fit: "
            f"{format_names([str(number) for number in result.diverged])}",
            MixtureWarning,
            stacklevel=2,
        )
    warn_rare_domains(result.domains, table.mixtures, origin)
    parameters: dict[str, object] = {
        "runs": len(table.keys),
        "swarm": [str(folder) for folder in folders],
        "diverged": result.diverged,
        "paper_flops": paper_flops,
    }
    return FitRuns(table, origin, parameters, {}, result.cost, folders)


def warn_rare_domains(
    domains: Sequence[str], mixtures: Array, where: str, remedy: str = ""
) -> None:
    """Warn of domains that none or few of the runs sample.

    Args:
        domains: names of the k domains.
        mixtures: [n, k] mixtures of the runs.
        where: source of the runs, for the message.
        remedy: end of the message.
    """
    counts = dict(zip(domains, (mixtures > 0).sum(axis=0).tolist(), strict=True))
    few = min(MIN_RUNS_PER_DOMAIN, len(mixtures))
    problems = []
    if without := [name for name, count in counts.items() if not count]:
        problems.append(f"no run has text of {format_names(without)}, which get weight 0")
    if scarce := [name for name, count in counts.items() if 0 < count < few]:
        problems.append(f"fewer than {few} runs have text of {format_names(scarce)}")
    if problems:
        warnings.warn(f"{where}: {'; '.join(problems)}{remedy}", MixtureWarning, stacklevel=3)


def target_shares(target: str | None, metrics: Sequence[str]) -> Array:
    """Share [m] of each metric in the target, summing to 1; uniform without ``--target``.

    Raises:
        UserError: for an unknown or repeated name, or a share that is not finite and > 0.
    """
    if target is None:
        return np.full(len(metrics), 1.0 / len(metrics))
    shares = np.zeros(len(metrics))
    for item in filter(None, map(str.strip, target.split(","))):
        loss, share = parse_share(item, target, metrics)
        name = matched([loss], metrics).get(loss)
        if name is None or shares[metrics.index(name)]:
            problem = f"unknown loss '{loss}'" if name is None else f"'{name}' is repeated"
            raise UserError(f"--target {target}: {problem}; there are {format_names(metrics)}")
        shares[metrics.index(name)] = share
    if not shares.any():
        raise UserError(f"--target {target}: empty; choose from {format_names(metrics)}")
    return shares / shares.sum()


def check_target(target: str | None, corpus: Corpus) -> None:
    """Raise UserError for a target that is unknown or has no held-out text in ``corpus``."""
    shares = dict(zip(corpus.names, target_shares(target, corpus.names), strict=True))
    measured = [
        name
        for name, domain in corpus.domains.items()
        if domain.valid.tokens >= MIN_HELD_OUT_TOKENS
    ]
    unmeasured = [name for name, share in shares.items() if share and name not in measured]
    if not measured or (target is not None and unmeasured):
        raise UserError(
            f"'{unmeasured[0]}' of {corpus.root} has no held-out text to measure proxies on; "
            f"preprocess it again with --split, or choose --target from {format_names(measured)}"
        )


def warn_mixed_scales(target: str | None, table: MixtureRuns, where: str) -> None:
    """Warn of a target that averages metrics of very different scales, such as accuracies.

    There is no warning if the user sets the shares.
    """
    if target is not None and "=" in target:
        return
    used = np.flatnonzero(target_shares(target, table.metrics))
    scales = np.median(np.abs(table.losses[:, used]), axis=0)
    if scales.max() > MAX_METRIC_RATIO * scales.min():
        small, large = (table.metrics[used[at]] for at in (scales.argmin(), scales.argmax()))
        warnings.warn(
            f"{where}: the target averages metrics of very different scales, {small} and "
            f"{large}; all of them are minimized, even accuracies; pass --target a,b or a=2,b=1",
            MixtureWarning,
            stacklevel=3,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class CrossValidation:
    """Prediction quality of a fit and of a linear baseline on held-out runs.

    The target is a weighted mean of losses. It can be harder to predict than each loss: a mixture
    that lowers the loss of one domain raises that of another, so the mean varies little.

    Attributes:
        fit: quality per loss [m], followed by that of the target, the weighted mean of losses.
        linear: the same for the linear baseline.
        procedure: how runs were held out.
    """

    fit: FitQuality
    linear: FitQuality
    procedure: str

    @classmethod
    def of(
        cls, fit: Array, linear: Array, losses: Array, shares: Array, procedure: str
    ) -> CrossValidation:
        """Compare predictions [n, m] of held-out runs with their ``losses`` [n, m]."""
        fit, linear, losses = (
            np.column_stack([values, values @ shares]) for values in (fit, linear, losses)
        )
        return cls(quality_of(fit, losses), quality_of(linear, losses), procedure)

    @property
    def verdict(self) -> str | None:
        """Warning about a fit whose error on the target is not the smallest; None otherwise."""
        error = self.fit.mae[-1]
        if error >= self.fit.spread[-1]:
            return "the fit predicts the target no better than a constant: the mixture is arbitrary"
        if error > self.linear.mae[-1]:
            return "a linear fit predicts the target better: the mixture is uncertain"
        return None

    def parameters(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The quality as JSON values, for the mixture file."""
        figures = {
            "spearman": self.fit.spearman,
            "mae": self.fit.mae,
            "mae_of_a_constant": self.fit.spread,
            "linear_spearman": self.linear.spearman,
            "linear_mae": self.linear.mae,
        }
        return {
            "measured_by": self.procedure,
            "target": _by_name(list(figures), [values[-1] for values in figures.values()]),
            **{name: _by_name(metrics, values[:-1]) for name, values in figures.items()},
        }

    def lines(self, metrics: Sequence[str], shares: Array, remedy: str) -> list[str]:
        """Lines of a table: a row per loss, a row for the target, and :attr:`verdict`."""

        def cells(name: str, at: int) -> list[str]:
            cells = [name]
            for quality in (self.fit, self.linear):
                rank = quality.spearman[at]
                cells += ["constant" if math.isnan(rank) else f"{rank:.3f}"]
                cells += [f"{quality.mae[at]:.4f}"]
            return [*cells, f"{self.fit.spread[at]:.4f}"]

        shown = [name + "*" * bool(share) for name, share in zip(metrics, shares, strict=True)]
        rows = [["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]]
        rows += [cells(name, at) for at, name in enumerate(shown)]
        rows.append(cells("target", -1))
        heading = f"error on held-out runs ({self.procedure}; * is in the target):"
        lines = [heading, *align_columns(rows)]
        return lines if self.verdict is None else [*lines, f"{self.verdict}; {remedy}"]


def _by_name(names: Sequence[str], values: Array | list[float]) -> dict[str, float | None]:
    """Name -> value; None for NaN, which JSON does not have."""
    pairs = zip(names, values, strict=True)
    return {name: None if math.isnan(value) else float(value) for name, value in pairs}
