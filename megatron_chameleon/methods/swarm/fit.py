"""Methods that fit losses over mixtures: get runs, fit them, cross-validate, write the mixture."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    Mixture,
    MixtureWarning,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.domains import format_names
from megatron_chameleon.methods.output import (
    align_columns,
    epoch_limit,
    format_weight,
    write_and_print,
)
from megatron_chameleon.methods.proxy import resolve_work_dir
from megatron_chameleon.methods.swarm.options import FitOptions, SwarmOptions
from megatron_chameleon.methods.swarm.runs import (
    FitRuns,
    check_target,
    existing_runs,
    sampled_mixtures,
    target_shares,
    token_shares,
    warn_mixed_scales,
    warn_rare_domains,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    FitQuality,
    Predict,
    fit_linear,
    held_out_predictions,
    quality_of,
    reach_of,
    target_quality,
)
from megatron_chameleon.model.flops import PaperSettings, paper_flops
from megatron_chameleon.progress import progress_bar

SECONDS_WITHOUT_BAR = 2.0
MAX_METRICS = 40
Options = TypeVar("Options", bound=FitOptions)


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A fit to runs.

    Attributes:
        heading: the line above the table.
        weights: [k] the best mixture by the fit, before the epoch limit.
        predict: mixtures [n, k] -> losses [n, m].
        refit: the same fit to a subset's mixtures [n, k] and losses [n, m]; calls its last argument
            after each of the m fits.
        parameters: of the method, for the mixture's file.
        remedy: what may improve a poor fit.
        closing: lines under the table.
    """

    heading: str
    weights: Array
    predict: Predict
    refit: Callable[[Array, Array, Callable[[], object]], Predict]
    parameters: dict[str, Any]
    remedy: str
    closing: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FitMethod(Generic[Options]):
    """What differs between the methods.

    Attributes:
        name: value of ``--method``.
        check: raises UserError for options that only fail later.
        check_number_of_runs: raises UserError for too few runs.
        train: trains swarms and returns their runs; None after a stop request. Every rank calls it.
        fit: the mixture for shares [m] of the losses of the runs.
        folds: positions held out together in each fold of cross-validation, for a number of runs.
    """

    name: str
    check: Callable[[Options], None]
    check_number_of_runs: Callable[[Options, int], None]
    train: Callable[[Options, Corpus], FitRuns | None]
    fit: Callable[[Options, Corpus, MixtureRuns, Array], Fitted]
    folds: Callable[[Options, int], list[Array]]


def compute_fit(method: FitMethod[Options], options: Options) -> bool:
    """Train or read the runs, fit them, write the mixture. Every rank calls this.

    Returns:
        Whether there is a mixture, the same on every rank; False after a stop request.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    corpus = Corpus.load(options.corpus)
    check_fit(method, options, corpus)
    if options.ratios is not None and options.metrics is not None:
        if is_first_rank():
            runs = existing_runs(options.ratios, options.metrics, corpus)
            warn_mixed_scales(options.target, runs.runs, str(options.metrics))
            fit_and_write(method, options, corpus, runs)
        return True
    trained = method.train(options, corpus)
    if trained is not None and is_first_rank():
        fit_and_write(method, options, corpus, trained)
    return trained is not None


def is_first_rank() -> bool:
    """Whether this is rank 0, also outside of process groups."""
    return int(os.environ.get("RANK", "0")) == 0


def check_fit(method: FitMethod[Options], options: Options, corpus: Corpus) -> None:
    """Raise UserError for what would otherwise fail only after the proxies have been trained."""
    if len(corpus.names) < 2:
        raise UserError(f"{corpus.root} has one domain and nothing to weigh; add another")
    method.check(options)
    epoch_limit(options, corpus, corpus.names).check()
    check_output(options.output, Mixture.KIND)
    if options.ratios is None:
        resolve_work_dir(options.output, options.work_dir)
        check_target(options.target, corpus)
        method.check_number_of_runs(options, options.num_proxies)


def mixtures_to_train(options: FitOptions, corpus: Corpus) -> Array:
    """Mixtures [n, k] of the proxies; warns of domains that few of them have.

    Raises:
        UserError: if the options do not allow as many.
    """
    count = options.num_proxies
    mixtures = sampled_mixtures(options.sampling, count, corpus)
    if is_first_rank():
        present = np.flatnonzero(token_shares(corpus))
        warn_rare_domains(
            [corpus.names[position] for position in present],
            mixtures[:, present],
            f"the mixtures of {count} proxies",
            "lower --smallest-weight, or raise --max-upweighting or --num-proxies",
        )
    return mixtures


def swarm_paper_flops(method: str, options: SwarmOptions, num_proxies: int) -> float:
    """FLOPs of a swarm as Chameleon's tables count them for ``method``."""
    tokens = options.train_iters * options.global_batch_size * options.seq_length
    settings = PaperSettings(
        model_size=options.model_size, trained_tokens=tokens, num_proxies=num_proxies
    )
    return paper_flops(method, settings)


def fit_and_write(
    method: FitMethod[Options], options: Options, corpus: Corpus, runs: FitRuns
) -> None:
    """Fit the runs, cross-validate the fit and a linear one, and write the mixture, on one rank."""
    stopwatch, table = Stopwatch(), runs.runs
    method.check_number_of_runs(options, len(table.keys))
    shares = target_shares(options.target, table.metrics)
    fitted = method.fit(options, corpus, table, shares)
    folds = method.folds(options, len(table.keys))
    total = len(folds) * len(table.metrics)
    with progress_bar(total, " fits", "cross-validating", delay=SECONDS_WITHOUT_BAR) as bar:
        held_out = held_out_predictions(
            lambda mixtures, losses: fitted.refit(mixtures, losses, bar.update),
            table.mixtures,
            table.losses,
            folds,
        )
    linear = held_out_predictions(fit_linear, table.mixtures, table.losses, folds)
    quality = cross_validated(
        held_out,
        linear,
        table.losses,
        shares,
        "leave one out" if len(folds) == len(table.keys) else f"{len(folds)}-fold cross-validation",
    )
    _write(method.name, fitted, shares, quality, options, corpus, runs, stopwatch)


@dataclasses.dataclass(frozen=True, eq=False)
class CrossValidation:
    """Quality of a fit and of a linear one on held-out runs.

    A target can be worse predicted than each loss in it: where one domain's loss falls another's
    rises, and the rest of their mean is noise.

    Attributes:
        fit: per loss [m].
        linear: per loss [m], of the linear fit.
        fit_of_target: of the one weighted sum that is minimized.
        linear_of_target: of the linear fit.
        procedure: how runs were held out.
    """

    fit: FitQuality
    linear: FitQuality
    fit_of_target: FitQuality
    linear_of_target: FitQuality
    procedure: str

    @property
    def verdict(self) -> str | None:
        """What is wrong with the fit, if its error of the target is not the smallest."""
        error = self.fit_of_target.mae[0]
        if error >= self.fit_of_target.spread[0]:
            return "the fit predicts the target no better than a constant: the mixture is arbitrary"
        if error > self.linear_of_target.mae[0]:
            return "a linear fit predicts the target better: the mixture is uncertain"
        return None

    def parameters(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The figures for the mixture's file."""
        fit, linear = self.fit_of_target, self.linear_of_target
        return {
            "measured_by": self.procedure,
            "target": {
                "spearman": _plain(fit.spearman[0]),
                "mae": float(fit.mae[0]),
                "mae_of_a_constant": float(fit.spread[0]),
                "linear_spearman": _plain(linear.spearman[0]),
                "linear_mae": float(linear.mae[0]),
            },
            "spearman": _by_name(metrics, self.fit.spearman),
            "mae": _by_name(metrics, self.fit.mae),
            "mae_of_a_constant": _by_name(metrics, self.fit.spread),
            "linear_spearman": _by_name(metrics, self.linear.spearman),
            "linear_mae": _by_name(metrics, self.linear.mae),
        }

    def lines(self, metrics: Sequence[str], shares: Array, remedy: str) -> list[str]:
        """A table with a row per loss and one for the target, and the verdict on a poor fit."""
        rows = [["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]]
        for at, metric in enumerate(metrics[:MAX_METRICS]):
            name = metric + ("*" if shares[at] else "")
            rows.append([name, *_cells(self.fit, self.linear, at)])
        rows.append(["target", *_cells(self.fit_of_target, self.linear_of_target, 0)])
        heading = f"error on held-out runs ({self.procedure}; * is in the target):"
        lines = [heading, *align_columns(rows)]
        if len(metrics) > MAX_METRICS:
            lines.append(f"... and {len(metrics) - MAX_METRICS} more losses, see the file")
        return lines if self.verdict is None else [*lines, f"{self.verdict}; {remedy}"]


def cross_validated(
    fit: Array, linear: Array, losses: Array, shares: Array, procedure: str
) -> CrossValidation:
    """Compare predictions of held-out runs with their losses; all [n, m].

    Args:
        fit: predictions of the fit.
        linear: predictions of a linear fit.
        losses: measured.
        shares: [m] of the losses in the target.
        procedure: how runs were held out.
    """
    return CrossValidation(
        fit=quality_of(fit, losses),
        linear=quality_of(linear, losses),
        fit_of_target=target_quality(fit, losses, shares),
        linear_of_target=target_quality(linear, losses, shares),
        procedure=procedure,
    )


def _cells(fit: FitQuality, linear: FitQuality, at: int) -> list[str]:
    return [
        *(_correlation(fit.spearman[at]), f"{fit.mae[at]:.4f}"),
        *(_correlation(linear.spearman[at]), f"{linear.mae[at]:.4f}"),
        f"{fit.spread[at]:.4f}",
    ]


def _correlation(value: float) -> str:
    return "constant" if math.isnan(value) else f"{value:.3f}"


def _by_name(names: Sequence[str], values: Array) -> dict[str, float | None]:
    return {name: _plain(value) for name, value in zip(names, values.tolist(), strict=True)}


def _plain(value: float) -> float | None:
    """JSON has no NaN: None."""
    return None if math.isnan(value) else float(value)


def _write(
    method: str,
    fitted: Fitted,
    shares: Array,
    quality: CrossValidation,
    options: FitOptions,
    corpus: Corpus,
    runs: FitRuns,
    stopwatch: Stopwatch,
) -> None:
    """Write and print the mixture; warn if it lies far from the runs."""
    names, table = list(corpus.names), runs.runs
    fields = epoch_limit(options, corpus, names).mixture_fields(fitted.weights)
    weights = np.array([fields["weights"][name] for name in names])
    predicted = fitted.predict(weights[None])[0]
    reach = reach_of(weights, table.mixtures)
    outside = [names[position] for position in reach.outside]
    nearest = table.keys[reach.nearest]
    spent = stopwatch.cost()
    mixture = Mixture(
        method=method,
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
            **_cost_parameters(options, runs, runs.cost + spent),
            **runs.parameters,
        },
        provenance=provenance(options, {"corpus": corpus.hash, **runs.inputs}),
        cost=spent,
        **fields,
    )
    if reach.extrapolates:
        where = f"; no run had such weights of {format_names(outside)}" if outside else ""
        warnings.warn(
            f"the mixture is far from the trained ones: it differs from the nearest run, {nearest},"
            f" in {reach.distance:.0%} of the tokens{where}; its predicted losses are extrapolated",
            MixtureWarning,
            stacklevel=2,
        )
    cost, of_what = runs.cost + spent, "all"
    if runs.unknown_costs:
        cost = spent
        of_what = f"the fit alone (unknown: {format_names(list(runs.unknown_costs))})"
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


def _cost_parameters(options: FitOptions, runs: FitRuns, total: Cost) -> dict[str, Any]:
    """What the report's ledger needs; a total only if all of its parts are known."""
    folder = options.output.parent
    costs: dict[str, Any] = {
        "made_from": [os.path.relpath(swarm, folder) for swarm in runs.made_from]
    }
    if runs.paper_flops is not None:
        costs["paper_flops"] = runs.paper_flops
    if runs.unknown_costs:
        return {**costs, "unknown_costs": list(runs.unknown_costs)}
    sums = {"flops": total.flops, "device_seconds": total.device_seconds}
    return {**costs, "total_cost": sums}
