"""Methods that fit losses over mixtures: train or read runs, fit, validate, write the mixture.

sampling.py samples the mixtures of a swarm, runs.py reads the losses of its members, or tables of
other runs, and quality.py measures how well a fit predicts them.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, provenance
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import Target
from megatron_chameleon.corpus.target_corpus import FOLDER_NAME, corpus_with_texts
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, matched
from megatron_chameleon.methods.limits import EpochLimit, epoch_limit, prior_weights
from megatron_chameleon.methods.output import (
    by_name,
    cost_totals,
    format_weight,
    warn,
    write_and_print,
)
from megatron_chameleon.methods.predicted_gain import write_prior_without_gain
from megatron_chameleon.methods.swarm import FitOptions
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.objective import (
    check_target,
    parse_objective,
    target_shares,
    warn_mixed_scales,
)
from megatron_chameleon.methods.swarm.quality import (
    NO_BETTER,
    cross_validated_gain,
    cross_validation,
    fit_problems,
    is_no_better,
    quality_table,
)
from megatron_chameleon.methods.swarm.runs import (
    COLLECT,
    FitRuns,
    check_collected,
    existing_runs,
    measured_runs,
    swarm_runs,
    warn_untrained,
    with_cost,
)
from megatron_chameleon.methods.swarm.sampling import (
    mixtures_to_train,
    next_round,
    require_lightgbm,
    started_rounds,
)
from megatron_chameleon.methods.swarm.space import SearchSpace
from megatron_chameleon.methods.swarm.train import train_swarm
from megatron_chameleon.methods.train_proxy import on_rank_0
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    Fit,
    Predict,
    fit_linear,
    held_out_predictions,
    reach_of,
)
from megatron_chameleon.mixture.gain import PredictedGain
from megatron_chameleon.mixture.optimum import Limits, nearest_mixtures
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.parallel.options import TrainingParallelOptions, is_rank_0
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

Options = TypeVar("Options", bound=FitOptions)


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A fit to runs.

    Attributes:
        heading: line on the fit, above the table.
        optimum: [k] the best mixture within the limits.
        free_optimum: [k] the same without the epoch limit.
        predict: mixtures [n, k] -> losses [n, m].
        held_out: [n, m] predictions for the runs of each fold, by a fit to the other runs.
        folds: folds of the cross-validation: positions of the held-out runs.
        parameters: parameters of the method, for the mixture file.
        remedy: how to improve a poor fit, for warnings.
        headlines: lines on the predicted gain, printed first.
        closing: lines under the table.
        gain: gain of the optimum over the prior; None if the cross-validation determines it.
    """

    heading: str
    optimum: Array
    free_optimum: Array
    predict: Predict
    held_out: Array
    folds: list[Array]
    parameters: dict[str, Any]
    remedy: str
    headlines: Sequence[str] = ()
    closing: Sequence[str] = ()
    gain: PredictedGain | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What is written: the optimum, or the prior within the limits.

    Attributes:
        written: which of the two.
        weights: [k] the weights within the limits.
        free_weights: [k] the same without the epoch limit.
        line: the decision and its reason, to be printed.
    """

    written: Literal["optimum", "prior"]
    weights: Array
    free_weights: Array
    line: str


class FitMethod(abc.ABC, Generic[Options]):
    """Base class of methods that fit the losses of runs; ``--method`` calls :meth:`compute`.

    Attributes:
        options: options of the method.
        corpus: corpus whose domains are weighed.
        space: the k domains of the search: those of the corpus, or fewer with ``--freeze``.
        prior: [k] weights of ``--prior``.
        measured: corpus of the proxies, in which the texts of the target are held-out domains.
        held_out: names of the measured domains that are never trained on.
        target: target of the mixture; None stands for the mean of all losses.
    """

    name: ClassVar[str]
    # Folder of a swarm in --work-dir; {} stands for its model size.
    swarm_folder: ClassVar[str] = "swarm"

    def __init__(self, options: Options) -> None:
        self.options, self.corpus = options, Corpus.load(options.corpus)
        self.space = SearchSpace.of(self.corpus, options.freeze)
        prior = prior_weights(
            options.fallback.prior,
            self.corpus.train_tokens,
            str(self.corpus.root),
            self.corpus.held_out,
        )
        self.prior = self.space.project(prior)
        self.measured = self.corpus
        self.held_out = set(self.corpus.held_out)
        self.target: Target | None = None
        if options.tables is None:  # a table's losses are known when it is read
            losses = [*self.corpus.all_domains, *options.swarm.downstream.tasks]
            self.target = parse_objective(options, options.objective, losses)

    @abc.abstractmethod
    def check_number_of_runs(self, count: int) -> None:
        """Raise UserError for too few runs to fit."""

    @abc.abstractmethod
    def fit(self, table: MixtureRuns, shares: Array) -> Fitted:
        """Fit the runs; minimize the weighted mean of their losses, with weights ``shares`` [m]."""

    @property
    def models(self) -> Sequence[str]:
        """Model sizes of the proxies; one swarm is trained for each."""
        return [self.options.swarm.model]

    def losses_to_fit(
        self, swarms: Mapping[str, SwarmResult]
    ) -> tuple[Array, list[str], dict[str, Any]]:
        """Return the losses to which the method is fitted.

        Args:
            swarms: model size -> its swarm, all on the same n mixtures.

        Returns:
            Losses [n, m], NaN where a member of any size diverged; lines to print; parameters for
            the mixture file.
        """
        (swarm,) = swarms.values()
        return swarm.losses[:, -1], [], {}

    def compute(self) -> bool:
        """Train or read the runs, fit them, write the mixture. Every rank calls this.

        Returns:
            Whether the mixture was written, the same on every rank; False after a stop request.

        Raises:
            UserError: for a mistake in the options or in the files that they name, if possible
                before training.
        """
        options, corpus = self.options, self.corpus
        if len(corpus.names) < 2:
            raise UserError(f"{corpus.root} has only one domain; add another domain")
        self.within_epochs(self.project_uniform())
        check_output(options.output, Mixture.KIND)
        if options.tables is not None:
            if is_rank_0():
                self.fit_and_write(self.read_runs(*options.tables))
            return True
        self.check_number_of_runs(options.num_proxies)
        self.measured = self.corpus_to_measure()
        self.held_out = set(self.measured.held_out)
        check_target(self.target, self.measured, options.swarm.downstream.tasks)
        mixtures = self.first_mixtures()
        if not options.fallback.accept_uncertain and on_rank_0(self.parallel, self.needs_no_proxy):
            return True
        trained = self.train(mixtures)
        if trained is not None and is_rank_0():
            warn_untrained(self.target_shares(trained.table), corpus, trained.table)
            self.fit_and_write(trained)
        return trained is not None

    def read_runs(self, ratios: Path, metrics: Path) -> FitRuns:
        """Read the user's tables, and set the target to losses that they have.

        Raises:
            UserError: for tables that cannot be read, do not fit the corpus or the swarm that they
                belong to, or lack a loss of the target.
        """
        options, folder = self.options, self.options.swarm_dir
        if folder is not None:
            SwarmRecord.load(folder)
            if not metrics.exists():
                raise UserError(
                    f"--swarm-dir {folder}: it has no {metrics.name}; {COLLECT} {folder}"
                )
        swarm = self.swarm_of(ratios)
        runs = existing_runs(ratios, metrics, self.corpus)
        value = options.objective
        if swarm is not None and metrics.parent == swarm.root:
            runs = with_cost(runs, swarm)
            # A corpus with the texts of a target is another one, but has the same training text.
            is_same = swarm.corpus_hash == self.corpus.hash
            if not is_same and set(swarm.held_out) <= self.held_out:
                warn(
                    f"the swarm in {swarm.root} was trained on another corpus than "
                    f"{self.corpus.root}, so its losses may differ from those on this text"
                )
            self.held_out |= set(swarm.held_out)
            if folder is not None and runs.cost is not None:
                check_collected(runs, swarm)
            if folder is not None and value is None:
                # Bits per byte of tasks are not averaged with nats per token of domains.
                value = ",".join(matched(swarm.tasks, runs.table.metrics).values()) or None
        self.target = parse_objective(options, value, runs.table.metrics)
        if self.target and self.target.texts:
            raise UserError(
                f"--target {options.target}: the runs of {metrics} are not measured on the text "
                f"'{next(iter(self.target.texts))}'; name columns of this table, or train proxies "
                "instead of reading runs"
            )
        warn_mixed_scales(value, self.target_shares(runs.table), runs.table, str(metrics))
        return runs

    def swarm_of(self, ratios: Path) -> SwarmRecord | None:
        """Return the swarm in the folder of the table; None for a table of other runs.

        Raises:
            UserError: if the swarm was generated with another ``--freeze``.
        """
        if not SwarmRecord.exists(ratios.parent):
            return None
        swarm = SwarmRecord.load(ratios.parent)
        if (frozen := swarm.frozen_mixture) != self.space.frozen_hash:
            flag = f"--freeze {self.options.freeze}: " if self.options.freeze else ""
            found, fix = "without --freeze", "omit --freeze"
            if frozen:
                found = f"with --freeze of the mixture with SHA-256 {frozen[:8]}..."
                fix = "pass this mixture as --freeze"
            raise UserError(f"{flag}the swarm in {ratios.parent} was generated {found}; {fix}")
        return swarm

    def target_shares(self, table: MixtureRuns) -> Array:
        """Return the share [m] of each metric of ``table`` in ``--target``."""
        return target_shares(self.target, table.metrics, self.held_out)

    def corpus_to_measure(self) -> Corpus:
        """Return the corpus of the proxies, the same on every rank."""
        if self.target is None or not self.target.texts:
            return self.corpus
        target, options = self.target, self.options
        source = SourceOptions((), text_key=options.target_text_key)
        folder = options.runs_folder / FOLDER_NAME
        return on_rank_0(
            self.parallel, lambda: corpus_with_texts(self.corpus, target, source, folder)
        )

    @property
    def parallel(self) -> TrainingParallelOptions:
        """Options of the process groups."""
        minutes = self.options.swarm.distributed_timeout_minutes
        return TrainingParallelOptions(distributed_timeout_minutes=minutes)

    @property
    def folders(self) -> dict[str, Path]:
        """Model size -> folder of its swarm."""
        root = self.options.runs_folder
        return {size: root / self.swarm_folder.format(Path(size).name) for size in self.models}

    @property
    def weight_limits(self) -> tuple[str | None, str | None]:
        """Values of ``--min-weight`` and ``--max-weight``, if the method has these options."""
        return None, None

    @property
    def token_shares(self) -> Array:
        """Share [k] of each domain of the search in the training tokens."""
        return self.space.token_shares

    @property
    def epoch_limit(self) -> EpochLimit:
        """``--max-epochs`` for the domains of the corpus."""
        return epoch_limit(self.options, self.corpus, self.corpus.names)

    @property
    def caps(self) -> Array | None:
        """Maximum weight [k] of each domain of the search within ``--max-epochs``, if any."""
        return self.space.caps(self.epoch_limit.caps)

    def within_epochs(self, weights: Array) -> Array:
        """Return the weights [k] within ``--max-epochs`` that are nearest to ``weights`` [k].

        Raises:
            UserError: if the domains with a weight cannot fill the budget.
        """
        return self.epoch_limit.apply(weights, self.caps)

    def project_uniform(self) -> Array:
        """Return the weights [k] of the search that are nearest to Uniform."""
        return self.space.project(np.full(len(self.corpus.names), 1.0 / len(self.corpus.names)))

    def limits(self, *, with_epochs: bool = True) -> Limits:
        """Return the prior, and the bounds within which it is written."""
        high = (self.token_shares > 0).astype(np.float64)
        caps = self.caps
        if caps is not None and with_epochs:
            high = np.minimum(high, caps)
        return Limits(self.prior, np.zeros_like(high), high)

    def needs_no_proxy(self) -> bool:
        """Write the prior if no gain over it is certain; return whether it was written."""
        if self.space.frozen is not None:
            print(
                f"no gain is predicted with --freeze: the prior '{self.options.fallback.prior}' "
                "does not keep the ratios; the proxies are trained",
                flush=True,
            )
            return False
        least, most = self.weight_limits
        return write_prior_without_gain(
            self.name,
            self.options,
            list(self.folders.values()),
            self.target,
            self.measured.root,
            tasks=self.options.swarm.downstream,
            min_weight=least,
            max_weight=most,
        )

    def first_mixtures(self) -> Array:
        """Return the mixtures [n, k] to train, of the rounds that have started.

        Raises:
            UserError: if the sampling options or the rounds are not possible.
        """
        options = self.options
        mixtures = mixtures_to_train(options, self.space)
        if options.swarm.rounds > 1:
            require_lightgbm("--rounds")
            folder = self.folders[self.models[0]]
            mixtures = started_rounds(options, self.corpus, mixtures, folder)
        return mixtures

    def train(self, mixtures: Array) -> FitRuns | None:
        """Train the swarms on ``mixtures`` [n, k] and those of later rounds, on every rank.

        Returns:
            The runs; None after a stop request.
        """
        options, swarms = self.options, dict[str, SwarmResult]()
        while True:
            for size, folder in self.folders.items():
                settings = dataclasses.replace(options.swarm, model=size)
                result = train_swarm(
                    settings, self.measured, mixtures, folder, self.space.frozen_hash
                )
                if result is None:
                    return None
                swarms[size] = result
                mixtures = result.mixtures
            losses, lines, parameters = self.losses_to_fit(swarms)
            if len(mixtures) == options.num_proxies:
                break
            # Every rank chooses, so that any error is raised on all; train_swarm uses rank 0's.
            table = measured_runs(list(swarms.values()), losses)
            mixtures = self.with_next_round(mixtures, table)
        swarm = options.swarm
        trained = options.num_proxies * swarm.tokens
        configs = [resolve_model(size, swarm.architecture, 1, 1) for size in self.models]
        flops = sum(paper_flops(config, trained_tokens=trained) for config in configs)
        runs = swarm_runs(list(swarms.values()), losses)
        return dataclasses.replace(
            runs,
            origin="\n".join([runs.origin, *lines]),
            parameters={
                **runs.parameters,
                "paper_flops": flops,
                "target_tokens": swarm.target_tokens,
                **parameters,
            },
        )

    def within_limits(self, mixtures: Array) -> tuple[Array, Array]:
        """Return the mixtures that may be the result, and that are nearest to ``mixtures`` [n, k].

        Returns:
            Mixtures [n, k], and the penalty [n] that the search for the result adds to the target.
        """
        limit = self.caps
        if limit is not None:
            has_text = (self.token_shares > 0).astype(np.float64)
            mixtures = nearest_mixtures(mixtures, np.zeros_like(limit), np.minimum(limit, has_text))
        return mixtures, np.zeros(len(mixtures))

    def searched(self, table: MixtureRuns) -> MixtureRuns:
        """Return ``table`` with the domains of the search."""
        mixtures = self.space.of_runs(table.keys, table.mixtures)
        return dataclasses.replace(table, domains=self.space.names, mixtures=mixtures)

    def with_next_round(self, mixtures: Array, table: MixtureRuns) -> Array:
        """Append the mixtures of the next round, see :func:`next_round`."""
        shares, searched = self.target_shares(table), self.searched(table)
        return next_round(self.options, self.space, mixtures, searched, shares, self.within_limits)

    def hold_out(self, refit: Fit, table: MixtureRuns, folds: list[Array]) -> Array:
        """Predict the losses [n, m] of the runs of each fold, by ``refit`` to the other runs."""
        bar = progress_bar(len(folds), " folds", "cross-validating", delay=SECONDS_WITHOUT_BAR)

        def fit_once(mixtures: Array, losses: Array) -> Predict:
            bar.update()
            return refit(mixtures, losses)

        with bar:
            return held_out_predictions(fit_once, table.mixtures, table.losses, folds)

    def decide(self, fitted: Fitted, reason: str | None) -> Decision:
        """Choose between the optimum and the prior.

        Args:
            fitted: the fit.
            reason: why the optimum is not preferred; None if it is.
        """
        fallback = self.options.fallback
        if reason is None or fallback.accept_uncertain:
            line = "written: the optimum" + " (--accept-uncertain)" * (reason is not None)
            return Decision("optimum", fitted.optimum, fitted.free_optimum, line)
        return Decision(
            "prior",
            self.limits().placed_prior,
            self.limits(with_epochs=False).placed_prior,
            f"written: the prior '{fallback.prior}' within the limits, since {reason}; "
            "--accept-uncertain writes the optimum",
        )

    def fit_and_write(self, runs: FitRuns) -> None:
        """Fit the runs, cross-validate this fit and a linear baseline, and write the mixture."""
        stopwatch, options, table = Stopwatch(), self.options, self.searched(runs.table)
        names, count = self.space.names, len(table.keys)
        self.check_number_of_runs(count)
        shares = self.target_shares(table)
        fitted = self.fit(table, shares)
        folds = fitted.folds
        linear = held_out_predictions(fit_linear, table.mixtures, table.losses, folds)
        quality = cross_validation(table, shares, fitted.held_out, linear)
        prior, reason = self.limits().placed_prior, None
        gain, headlines = fitted.gain, fitted.headlines
        if gain is None:
            compared = np.stack([fitted.optimum, prior])
            best, usual = fitted.predict(compared) @ shares
            errors = (fitted.held_out - table.losses) @ shares
            gain = cross_validated_gain(table.mixtures, errors, compared, float(usual - best))
            ratios = " with the frozen ratios" * (self.space.frozen is not None)
            headlines = [gain.describe(f"the prior '{options.fallback.prior}'{ratios}")]
            reason = NO_BETTER if is_no_better(quality) else None
        if not gain.low > 0:  # also NaN
            reason = reason or "the optimum is not certain to be better"
        elif prior[~table.mixtures.any(axis=0)].any():
            reason = reason or "no run samples some of its domains, so its loss is unknown"
        decision = self.decide(fitted, reason)
        problems = fit_problems(quality) if decision.written == "optimum" else []
        weights = decision.weights
        predicted = fitted.predict(weights[None])[0]
        reach = reach_of(weights, table.mixtures)
        outside = [names[position] for position in reach.outside]
        nearest = table.keys[reach.nearest]
        if reach.extrapolates:
            where = f"; weights out of range: {format_names(outside)}" if outside else ""
            warn(
                f"the mixture is far from all trained mixtures: {reach.distance:.0%} of its tokens "
                f"differ from the nearest run, {nearest}{where}; the predicted losses are "
                "extrapolated"
            )
        procedure = "leave one out"
        if len(folds) < count:
            procedure = f"{len(folds)}-fold cross-validation"
        # JSON cannot represent NaN, so NaN is stored as null.
        as_json = quality.astype(object).where(quality.notna(), None)
        spent = stopwatch.cost()
        cost, of_what = spent, "the fit alone (the cost of the runs is unknown)"
        if runs.cost is not None:
            cost, of_what = runs.cost + spent, "all"
        target = {} if self.target is None else {"target": dataclasses.asdict(self.target.record)}
        mixture = Mixture(
            method=self.name,
            parameters={
                "predicted_gain": {"prior": dataclasses.asdict(gain)},
                **fitted.parameters,
                **target,
                "written": decision.written,
                "optimum": by_name(names, fitted.optimum),
                "target_shares": by_name(table.metrics, shares),
                "predicted_losses": by_name(table.metrics, predicted),
                "fit": {
                    "measured_by": procedure,
                    "target": as_json.iloc[-1].to_dict(),
                    **as_json.iloc[:-1].to_dict(),
                },
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
                **self.frozen_parameters(weights),
            },
            provenance=provenance(options, self.inputs(runs)),
            cost=spent,
            **self.epoch_limit.mixture_fields(
                self.space.expand(decision.free_weights), self.space.expand(weights)
            ),
        )
        write_and_print(
            mixture,
            options,
            self.corpus,
            "\n".join([*headlines, decision.line, fitted.heading, f"fitted to {runs.origin}"]),
            *self.frozen_lines(weights),
            *fitted.closing,
            f"error on held-out runs ({procedure}; * marks a loss in the target):",
            *quality_table(quality, shares),
            *(f"{problem}; {fitted.remedy}" for problem in problems),
            f"target loss: predicted {float(predicted @ shares):.4f}, minimum over the runs "
            f"{float((table.losses @ shares).min()):.4f}; distance to the nearest run, {nearest}: "
            f"{format_weight(reach.distance)} of the tokens (for 95% of the runs: at most "
            f"{format_weight(reach.usual)})",
            f"cost of {of_what}: {cost.flops:.2e} FLOPs, {cost.device_seconds:,.1f} device seconds",
        )

    def inputs(self, runs: FitRuns) -> dict[str, str]:
        """Name of each input of the mixture -> its hash."""
        found = {"corpus": self.corpus.hash, **runs.inputs}
        if self.target and self.target.texts:
            found["target text"] = self.target.texts_hash
        if self.space.frozen:
            found["frozen mixture"] = self.space.frozen.hash
        return found

    def frozen_parameters(self, weights: Array) -> dict[str, object]:
        """Describe the frozen mixture and the ``weights`` [k] of the search, for the file."""
        if self.space.frozen is None:
            return {}
        return {
            "frozen": {
                "mixture": self.space.frozen.hash,
                "ratios": self.space.frozen.weights,
                "searched_weights": by_name(self.space.names, weights),
            }
        }

    def frozen_lines(self, weights: Array) -> list[str]:
        """Describe the weight of the frozen mixture in the result, if there is one."""
        if self.space.frozen is None:
            return []
        return [
            f"{format_names(list(self.space.frozen.weights))} keep the ratios of --freeze "
            f"{self.options.freeze}; together they have the weight {format_weight(weights[0])}"
        ]
