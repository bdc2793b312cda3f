"""Methods that fit losses over mixtures: train or read runs, fit, validate, write the mixture.

The runs are the members of swarms, or tables of existing runs (--ratios, --metrics).
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pandas as pd

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, Stopwatch, provenance
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import Target, parse_target
from megatron_chameleon.corpus.target_corpus import FOLDER_NAME, corpus_with_texts
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.evaluation.perplexity import token_counts, unigram_loss
from megatron_chameleon.interchange.mixture_runs import (
    MixtureRuns,
    is_training_loss,
    matched,
    read_mixture_runs,
)
from megatron_chameleon.methods.limits import epoch_limit, prior_weights
from megatron_chameleon.methods.output import (
    by_name,
    cost_totals,
    format_weight,
    warn,
    write_and_print,
)
from megatron_chameleon.methods.predicted_gain import write_prior_without_gain
from megatron_chameleon.methods.proxy import on_rank_0
from megatron_chameleon.methods.swarm import (
    FitOptions,
    GenerateOptions,
    MixtureSamplingOptions,
)
from megatron_chameleon.methods.swarm.space import SearchSpace
from megatron_chameleon.methods.swarm.swarm import SwarmResult, train_swarm
from megatron_chameleon.mixture.acquisition import next_mixtures
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    Fit,
    Predict,
    fit_linear,
    held_out_predictions,
    quality_of,
    reach_of,
)
from megatron_chameleon.mixture.mixmin import Limits
from megatron_chameleon.mixture.optimum import nearest_mixtures
from megatron_chameleon.mixture.regmix import SamplingRule, sample_mixtures
from megatron_chameleon.mixture.surrogate import FEWEST_RUNS, fit_surrogate
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.progress import progress_bar

SECONDS_WITHOUT_BAR = 2.0
# Warn about a domain if fewer runs than this sample it: its effect on the losses is uncertain.
MIN_RUNS_PER_DOMAIN = 5
# Warn about a target whose metrics differ in magnitude by more than this factor, since they may not
# all be losses: the losses of a model on several domains differ by a smaller factor.
MAX_METRIC_RATIO = 5.0
# A domain needs this many held-out tokens: one to predict, and one as its context.
MIN_HELD_OUT_TOKENS = 2
# A round chooses its mixtures among this many sampled mixtures, in addition to one per proxy.
MAX_CANDIDATES = 1024
# Mixtures whose weights are equal to this number of decimal places count as the same mixture.
NUM_DIGITS = 9
# Tokens that are counted, of a domain's training text and of its held-out text, for the loss of a
# unigram model.
UNIGRAM_TOKENS = 1 << 24
NO_BETTER = "the fit predicts the target no better than a constant"
Options = TypeVar("Options", bound=FitOptions)


@dataclasses.dataclass(frozen=True, eq=False)
class FitRuns:
    """Runs on mixtures of the corpus's domains, and the source of the runs.

    Attributes:
        table: mixtures and losses, without runs that diverged; its domains are the corpus's.
        origin: printed description of the source of the runs.
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
        heading: lines above the table.
        weights: [k] mixture with the lowest predicted loss, before the epoch limit.
        predict: mixtures [n, k] -> losses [n, m].
        refit: repeats the fit on the mixtures [n, k] and losses [n, m] of a subset of the runs;
            None if ``held_out`` is set.
        folds: folds of the cross-validation: positions of the held-out runs.
        parameters: parameters of the method, for the mixture file.
        remedy: how to improve a poor fit, for warnings.
        closing: lines under the table.
        within_limit: [k] the best mixture within the epoch limit; None selects the mixture nearest
            to ``weights``.
        is_decided: whether :meth:`FitMethod.fit` has chosen between the optimum and the prior.
        held_out: [n, m] predictions for the runs of each fold, if :meth:`FitMethod.fit` has
            computed them.
    """

    heading: str
    weights: Array
    predict: Predict
    refit: Fit | None
    folds: list[Array]
    parameters: dict[str, Any]
    remedy: str
    closing: tuple[str, ...] = ()
    within_limit: Array | None = None
    is_decided: bool = False
    held_out: Array | None = None


class FitMethod(abc.ABC, Generic[Options]):
    """Base class of methods that fit the losses of runs; ``--method`` calls :meth:`compute`.

    Attributes:
        options: options of the method.
        corpus: corpus whose domains are weighed.
        space: the k domains of the search: those of the corpus, or fewer with ``--freeze``.
        prior: [k] weights of ``--prior``.
        measured: corpus of the proxies, in which the texts of the target are held-out domains.
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
        self.target: Target | None = None
        if options.ratios is None:  # a table's losses are known when it is read
            losses = [*self.corpus.all_domains, *options.swarm.downstream.tasks]
            self.target = parse_objective(options, losses)

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
        is_main = int(os.environ.get("RANK", "0")) == 0
        if len(corpus.names) < 2:
            raise UserError(f"{corpus.root} has only one domain; add another domain")
        limit = epoch_limit(options, corpus, corpus.names)
        limit.apply(self.project_uniform(), self.caps)
        check_output(options.output, Mixture.KIND)
        if options.ratios is not None and options.metrics is not None:
            swarm = self.swarm_of(options.ratios)
            if is_main:
                runs = existing_runs(options.ratios, options.metrics, corpus)
                if swarm is not None and options.metrics.parent == swarm.root:
                    runs = with_cost(runs, swarm)
                self.target = parse_objective(options, runs.table.metrics)
                if self.target and self.target.texts:
                    raise UserError(
                        f"--target {options.target}: the runs of {options.metrics} are not "
                        f"measured on the text '{next(iter(self.target.texts))}'; name columns of "
                        "this table, or train proxies without --ratios and --metrics"
                    )
                shares = self.target_shares(runs.table)
                warn_mixed_scales(options.objective, shares, runs.table, str(options.metrics))
                self.fit_and_write(runs)
            return True
        self.check_number_of_runs(options.num_proxies)
        self.measured = self.corpus_to_measure()
        check_target(self.target, self.measured, options.swarm.downstream.tasks)
        mixtures = self.first_mixtures()
        if (
            not options.fallback.accept_uncertain
            and self.space.frozen is None  # the prior does not have its ratios
            and on_rank_0(self.parallel, self.needs_no_proxy)
        ):
            return True
        trained = self.train(mixtures)
        if trained is not None and is_main:
            warn_untrained(self.target_shares(trained.table), corpus, trained.table)
            self.fit_and_write(trained)
        return trained is not None

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
        return target_shares(self.target, table.metrics, self.measured.held_out)

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
        return self.space.project(token_shares(self.corpus))

    @property
    def caps(self) -> Array | None:
        """Maximum weight [k] of each domain of the search within ``--max-epochs``, if any."""
        return self.space.caps(epoch_limit(self.options, self.corpus, self.corpus.names).caps)

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
        mixtures = mixtures_to_train(options, self.corpus, self.space)
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
        """Append the mixtures of the next round to ``mixtures`` [n, domains of the corpus].

        The choice depends on the options and on the losses of the finished members only.

        Args:
            mixtures: [n, domains of the corpus] mixtures of the finished members.
            table: mixtures and losses of those that did not diverge.

        Raises:
            UserError: if too few members did not diverge, or too few mixtures are possible.
        """
        options, token_share, table = self.options, self.token_shares, self.searched(table)
        if len(table.keys) < FEWEST_RUNS:
            raise UserError(
                f"only {len(table.keys)} of {len(mixtures)} proxies did not diverge, but the "
                f"surrogate of --rounds needs {FEWEST_RUNS}; lower --lr, and choose another "
                "--work-dir"
            )
        extra = MAX_CANDIDATES
        while True:
            # If the options do not allow this many distinct mixtures, use fewer candidates.
            try:
                candidates = sampled(options.sampling, token_share, options.num_proxies + extra)
                break
            except ValueError:
                if not extra:
                    raise
                extra //= 2
        candidates, penalties = self.within_limits(candidates)
        # Moving a mixture into the limits may round its weights.
        searched = self.space.of_runs([str(n) for n in range(len(mixtures))], mixtures)
        rounded = np.round(np.concatenate([searched, candidates]), NUM_DIGITS)
        _, first = np.unique(rounded, axis=0, return_index=True)
        new = np.sort(first[first >= len(mixtures)]) - len(mixtures)
        shares = self.target_shares(table)
        used = np.flatnonzero(shares)
        seed = options.sampling.mixture_seed
        count = min(end for end in round_ends(options) if end > len(mixtures)) - len(mixtures)
        surrogate = fit_surrogate(table.mixtures, table.losses[:, used], seed)
        try:
            chosen = next_mixtures(
                surrogate,
                shares[used],
                candidates[new],
                count,
                seed + len(mixtures),
                penalties[new],
            )
        except ValueError as error:
            raise UserError(
                f"--rounds {options.swarm.rounds}: {error}, or loosen the limits"
            ) from error
        return np.concatenate([mixtures, self.space.expand(candidates[new][chosen])])

    def fit_and_write(self, runs: FitRuns) -> None:
        """Fit the runs, cross-validate this fit and a linear baseline, and write the mixture."""
        stopwatch, options, table = Stopwatch(), self.options, self.searched(runs.table)
        target, inputs = self.target, {"corpus": self.corpus.hash, **runs.inputs}
        if target and target.texts:
            inputs["target text"] = target.texts_hash
        if self.space.frozen:
            inputs["frozen mixture"] = self.space.frozen.hash
        names, count = self.space.names, len(runs.table.keys)
        self.check_number_of_runs(count)
        shares = self.target_shares(table)
        fitted = self.fit(table, shares)
        folds = fitted.folds
        data = table.mixtures, table.losses, folds
        held_out, refit = fitted.held_out, fitted.refit
        if held_out is None:
            assert refit is not None
            bar = progress_bar(len(folds), " folds", "cross-validating", delay=SECONDS_WITHOUT_BAR)

            def fit_once(mixtures: Array, losses: Array) -> Predict:
                bar.update()
                return refit(mixtures, losses)

            with bar:
                held_out = held_out_predictions(fit_once, *data)
        linear = held_out_predictions(fit_linear, *data)
        procedure = f"{len(folds)}-fold cross-validation"
        if len(folds) == count:
            procedure = "leave one out"
        quality = cross_validation(table, shares, held_out, linear)
        # JSON cannot represent NaN, so NaN is stored as null.
        as_json = quality.astype(object).where(quality.notna(), None)
        limit = epoch_limit(options, self.corpus, self.corpus.names)
        free, weights = fitted.weights, fitted.within_limit
        if weights is None:
            weights = limit.apply(free, self.caps)
        decision, problems = dict[str, object](), fit_problems(quality)
        written = ""
        if not fitted.is_decided:
            optimum, prior = weights, self.limits().placed_prior
            reason = reason_for_prior(quality, fitted.predict(np.stack([optimum, prior])) @ shares)
            decision = {"written": "optimum", "optimum": by_name(names, optimum)}
            if reason is not None and not options.fallback.accept_uncertain:
                free, weights = self.limits(with_epochs=False).placed_prior, prior
                decision["written"], problems = "prior", []
                written = (
                    f"written: the prior '{options.fallback.prior}' within the limits, since "
                    f"{reason}; --accept-uncertain writes the optimum\n"
                )
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
        spent = stopwatch.cost()
        if runs.cost is None:
            cost, of_what = spent, "the fit alone (the cost of the runs is unknown)"
        else:
            cost, of_what = runs.cost + spent, "all"
        mixture = Mixture(
            method=self.name,
            parameters={
                **fitted.parameters,
                **({} if target is None else {"target": dataclasses.asdict(target.record)}),
                **decision,
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
            provenance=provenance(options, inputs),
            cost=spent,
            **limit.mixture_fields(self.space.expand(free), self.space.expand(weights)),
        )
        write_and_print(
            mixture,
            options,
            self.corpus,
            f"{written}{fitted.heading}\nfitted to {runs.origin}",
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


def token_shares(corpus: Corpus) -> Array:
    """Return the share [k] of each domain in the training tokens.

    Raises:
        UserError: if there are no training tokens.
    """
    tokens = np.array(list(corpus.train_tokens.values()), np.float64)
    if tokens.sum() <= 0:
        raise UserError(f"{corpus.root} has no training tokens; preprocess text into it")
    shares: Array = tokens / tokens.sum()
    return shares


def mixtures_to_train(
    options: FitOptions | GenerateOptions, corpus: Corpus, space: SearchSpace
) -> Array:
    """Sample the proxies' mixtures [n, k] of the k domains of ``corpus``, within ``space``.

    Warn about domains that few mixtures contain.

    Raises:
        UserError: if the sampling options do not allow n distinct mixtures.
    """
    count, shares = options.num_proxies, space.project(token_shares(corpus))
    try:
        mixtures = sampled(options.sampling, shares, count)
    except ValueError as error:
        raise UserError(f"--num-proxies {count} and the mixture sampling flags: {error}") from error
    present = np.flatnonzero(shares)
    warn_rare_domains(
        [space.names[position] for position in present],
        mixtures[:, present],
        f"the mixtures of {count} proxies",
        "; lower --smallest-weight, or raise --max-upweighting or --num-proxies",
    )
    return space.expand(mixtures)


def sampled(sampling: MixtureSamplingOptions, shares: Array, count: int) -> Array:
    """Sample ``count`` mixtures [count, k] around the domains' token ``shares`` [k].

    Raises:
        ValueError: if the options do not allow that many distinct mixtures.
    """
    rule = dict(vars(sampling))
    seed = rule.pop("mixture_seed")
    return sample_mixtures(shares, count, seed, SamplingRule(**rule))


def round_ends(options: FitOptions) -> list[int]:
    """Return the number of members after each of ``--rounds``."""
    rounds = options.swarm.rounds
    return [options.num_proxies * number // rounds for number in range(1, rounds + 1)]


def started_rounds(options: FitOptions, corpus: Corpus, mixtures: Array, folder: Path) -> Array:
    """Return the mixtures [members, k] of the rounds that have started.

    Args:
        options: options of the method, with more than one round.
        corpus: the corpus.
        mixtures: [n, k] sampled mixtures, of which the first round uses the first.
        folder: folder of the swarm, which records the mixtures of later rounds, if any.

    Raises:
        UserError: if the first round has too few members for a surrogate.
    """
    first = round_ends(options)[0]
    if first < FEWEST_RUNS:
        raise UserError(
            f"--rounds {options.swarm.rounds} of --num-proxies {options.num_proxies}: the first "
            f"round has {first} proxies, but a surrogate needs {FEWEST_RUNS}; use fewer rounds or "
            "more proxies"
        )
    mixtures = mixtures[:first]
    if SwarmRecord.exists(folder):
        record = SwarmRecord.load(folder)
        if record.domains == corpus.names:
            recorded = np.array(record.mixtures[first : options.num_proxies])
            mixtures = np.concatenate([mixtures, recorded.reshape(-1, len(corpus.names))])
    return mixtures


def require_lightgbm(flag: str) -> None:
    """Raise UserError if LightGBM, which ``flag`` needs, cannot be imported."""
    try:
        import lightgbm  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"{flag} needs LightGBM ({error}): pip install lightgbm; if it cannot load libgomp, "
            "apt-get install libgomp1"
        ) from error


def existing_runs(ratios: Path, metrics: Path, corpus: Corpus) -> FitRuns:
    """Read runs from the user's tables, and map their columns to the domains of ``corpus``.

    A metric that matches a domain, also a held-out one, gets the domain's name; other metrics, such
    as tasks, keep their names. Renamed columns are reported.

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
    matches = matched(read.metrics, list(corpus.all_domains))
    for column, metric in zip(read.metric_columns, read.metrics, strict=True):
        # Other columns, such as lambada_train, are tasks, which are used by their names only.
        if metric in matches and is_training_loss(column) and column not in corpus.all_domains:
            raise UserError(
                f"{metrics}: '{column}' is a training loss; pass held-out losses, and remove the "
                "column"
            )
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


def with_cost(runs: FitRuns, swarm: SwarmRecord) -> FitRuns:
    """Add the cost of ``swarm`` to ``runs`` if their losses are those of its members.

    The tables in the folder of a swarm may also hold losses of another trainer's runs.

    Raises:
        UserError: for a damaged result of a member.
    """
    measured = {
        str(number): {*member.losses[-1], *member.bits_per_byte.values()}
        for number, member in swarm.finished.items()
        if member.losses
    }
    rows = zip(runs.table.keys, runs.table.losses.tolist(), strict=True)
    if not all({*losses} <= measured.get(key, set()) for key, losses in rows):
        return runs
    parameters = {key: value for key, value in runs.parameters.items() if key != "unknown_costs"}
    return dataclasses.replace(runs, parameters=parameters, cost=swarm.cost, made_from=[swarm.root])


def measured_runs(swarms: Sequence[SwarmResult], losses: Array) -> MixtureRuns:
    """Return a table of the members that did not diverge in any swarm, with ``losses`` [n, m]."""
    diverged = sorted({number for swarm in swarms for number in swarm.diverged})
    return dataclasses.replace(swarms[0], diverged=diverged).runs(losses)


def swarm_runs(swarms: Sequence[SwarmResult], losses: Array) -> FitRuns:
    """Return the members that did not diverge in any swarm.

    Args:
        swarms: swarms that were trained on the same mixtures.
        losses: [n, m] losses to fit: measured after a step, or extrapolated.

    Raises:
        UserError: if all members diverged, or no domain has held-out text.
    """
    diverged = sorted({number for swarm in swarms for number in swarm.diverged})
    table = measured_runs(swarms, losses)
    folders, count = [swarm.folder for swarm in swarms], len(losses)
    origin = f"{len(table.keys)} proxies of {' and '.join(map(str, folders))}"
    if not table.metrics:
        raise UserError(
            f"{origin}: no loss is finite, since all {count} proxies diverged or no domain has "
            "held-out text; lower --lr or raise --lr-warmup-iters, and choose another --work-dir"
        )
    if diverged:
        warn(
            f"{len(diverged)} of {count} proxies diverged and are left out of the fit: "
            f"{format_names(list(map(str, diverged)))}"
        )
    warn_rare_domains(table.domains, table.mixtures, origin)
    parameters = {
        "runs": len(table.keys),
        "swarm": list(map(str, folders)),
        "diverged": diverged,
    }
    cost = sum((swarm.cost for swarm in swarms), Cost())
    return FitRuns(table, origin, parameters, {}, cost, folders)


def warn_rare_domains(
    domains: Sequence[str], mixtures: Array, where: str, remedy: str = ""
) -> None:
    """Warn about domains that no run or only few runs sample.

    Args:
        domains: names of the k domains.
        mixtures: [n, k] mixtures of the runs.
        where: source of the runs, for the message.
        remedy: end of the message.
    """
    counts = by_name(domains, (mixtures > 0).sum(axis=0))
    few = min(MIN_RUNS_PER_DOMAIN, len(mixtures))
    problems = []
    if without := [name for name, count in counts.items() if not count]:
        problems.append(f"no run samples {format_names(without)}, so the fit gives them weight 0")
    if scarce := [name for name, count in counts.items() if 0 < count < few]:
        problems.append(f"fewer than {few} runs sample {format_names(scarce)}")
    if problems:
        warn(f"{where}: {'; '.join(problems)}{remedy}")


def parse_objective(options: FitOptions, names: Sequence[str]) -> Target | None:
    """Parse ``--target``, or its default; None stands for the mean of all losses.

    Args:
        options: options of the method.
        names: losses that may be named, in any spelling.

    Raises:
        UserError: for an invalid target.
    """
    if options.objective is None:
        return None
    source = SourceOptions((), text_key=options.target_text_key)
    return parse_target(
        options.objective, names, source, lambda name: matched([name], names).get(name)
    )


def target_shares(
    target: Target | None, metrics: Sequence[str], held_out: Container[str] = ()
) -> Array:
    """Return the share [m] of each metric in the target.

    Without a target, all metrics but the losses of ``held_out`` domains have equal shares. The
    shares sum to 1.

    Raises:
        UserError: if a name of the target is not measured, or nothing but held-out domains is
            measured and there is no target.
    """
    if target is None:
        measured = np.array([metric not in held_out for metric in metrics], np.float64)
        if not measured.any():
            raise UserError(f"the losses are those of held-out domains; pass --target {metrics[0]}")
        return measured / measured.sum()
    if missing := target.shares.keys() - set(metrics):
        raise UserError(
            f"--target {target.value}: no run is measured on '{min(missing)}'; choose from "
            f"{format_names(metrics)}"
        )
    return np.array([target.shares.get(metric, 0.0) for metric in metrics])


def check_target(target: Target | None, corpus: Corpus, tasks: Sequence[str]) -> None:
    """Raise UserError for a task with a domain's name, or a target without held-out text."""
    if both := [task for task in tasks if task in corpus.all_domains]:
        raise UserError(
            f"--tasks {both[0]}: {corpus.root} has a domain of that name; leave the task out, or "
            "rename the domain"
        )
    names = [*corpus.all_domains, *tasks]
    shares = by_name(names, target_shares(target, names, corpus.held_out))
    measured = [
        name
        for name, domain in corpus.all_domains.items()
        if domain.valid.tokens >= MIN_HELD_OUT_TOKENS
    ]
    wanted = [name for name in corpus.all_domains if shares[name]]
    unmeasured = [name for name in wanted if name not in measured]
    if not measured or (unmeasured and (target is not None or unmeasured == wanted)):
        first, others = [*unmeasured, *corpus.names][0], format_names([*measured, *tasks])
        raise UserError(
            f"'{first}' of {corpus.root} has no held-out text to measure proxies on; "
            f"preprocess it again with --split, or choose --target from {others}"
        )


def warn_mixed_scales(target: str | None, shares: Array, table: MixtureRuns, where: str) -> None:
    """Warn about a target that averages metrics of very different scales, such as accuracies.

    There is no warning if the user sets the shares [m].
    """
    if target is not None and "=" in target:
        return
    used = np.flatnonzero(shares)
    scales = np.median(np.abs(table.losses[:, used]), axis=0)
    if scales.max() > MAX_METRIC_RATIO * scales.min():
        small, large = (table.metrics[used[at]] for at in (scales.argmin(), scales.argmax()))
        warn(
            f"{where}: the target averages metrics of very different scales, {small} and "
            f"{large}; all metrics are minimized, even accuracies; select metrics with --target "
            "a,b or a=2,b=1"
        )


def warn_untrained(target_shares: Array, corpus: Corpus, table: MixtureRuns) -> None:
    """Warn if at least half of the runs predict the target's domains worse than token frequencies.

    Such runs have learned little more than which tokens are frequent, and the best mixture for this
    can be a bad one for longer runs. Held-out domains are not compared, since they have no training
    text to take token frequencies from.
    """
    shares = by_name(table.metrics, target_shares)
    domains = [name for name in corpus.names if shares.get(name)]
    if not domains:
        return
    unigram, opened = [], open_domains(corpus)
    for name in domains:
        held_out = opened.open(name, "valid").tokens
        seen = token_counts(held_out, corpus.tokenizer.vocab_size, UNIGRAM_TOKENS)
        unigram.append(unigram_loss(opened, name, seen, UNIGRAM_TOKENS))
    losses = table.losses[:, [table.metrics.index(name) for name in domains]]
    weights = np.array([shares[name] for name in domains])
    average = float(np.median(losses @ weights / weights.sum()))
    frequencies = float(unigram @ weights / weights.sum())
    if average >= frequencies:
        warn(
            "the proxies are hardly trained: half of them have a target loss of "
            f"{average:.2f} or more, and token frequencies alone have {frequencies:.2f}; the best "
            "mixture of longer runs is probably another one: raise --train-iters"
        )


def cross_validation(
    table: MixtureRuns, shares: Array, held_out: Array, linear: Array
) -> pd.DataFrame:
    """Compute how well a fit and a linear baseline predict held-out runs.

    The target is a weighted mean of losses. It can be harder to predict than each loss: a mixture
    that lowers the loss of one domain raises that of another, so the mean varies little.

    Args:
        table: n runs with m losses.
        shares: [m] share of each loss in the target.
        held_out: [n, m] predictions of the fit for runs that were held out of it.
        linear: [n, m] predictions of the linear baseline.

    Returns:
        A row per loss, and the target in the last row, with the columns spearman, mae,
        mae_of_a_constant (of the best constant), linear_spearman and linear_mae.
    """
    fit, baseline, losses = (
        np.column_stack([values, values @ shares]) for values in (held_out, linear, table.losses)
    )
    found, simple = quality_of(fit, losses), quality_of(baseline, losses)
    columns = {
        "spearman": found.spearman,
        "mae": found.mae,
        "mae_of_a_constant": found.spread,
        "linear_spearman": simple.spearman,
        "linear_mae": simple.mae,
    }
    return pd.DataFrame(columns, [*table.metrics, "target"])


def reason_for_prior(quality: pd.DataFrame, predicted: Array) -> str | None:
    """Return why the fit does not prefer the optimum to the prior; None if it does.

    Args:
        quality: as from :func:`cross_validation`.
        predicted: [2] predicted target loss of the optimum and of the prior.
    """
    target = quality.iloc[-1]
    if target.mae >= target.mae_of_a_constant:
        return NO_BETTER
    if predicted[0] >= predicted[1]:
        return "the fit predicts no gain over it"
    return None


def fit_problems(quality: pd.DataFrame) -> list[str]:
    """Return a warning if a constant or a linear fit predicts the target better than the fit."""
    target = quality.iloc[-1]
    if target.mae >= target.mae_of_a_constant:
        return [f"{NO_BETTER}: the mixture is arbitrary"]
    if target.mae > target.linear_mae:
        return ["a linear fit predicts the target better: the mixture is uncertain"]
    return []


def quality_table(quality: pd.DataFrame, shares: Array) -> list[str]:
    """Format the result of :func:`cross_validation` as a table; * marks losses in the target."""
    rows = [["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]]
    for row, share in zip(quality.itertuples(), [*shares, 0.0], strict=True):
        ranks = [
            "constant" if math.isnan(rank) else f"{rank:.3f}"
            for rank in (row.spearman, row.linear_spearman)
        ]
        errors = [f"{each:.4f}" for each in (row.mae, row.linear_mae, row.mae_of_a_constant)]
        name = f"{row.Index}*" if share else row.Index
        rows.append([name, ranks[0], errors[0], ranks[1], *errors[1:]])
    return align_columns(rows)
