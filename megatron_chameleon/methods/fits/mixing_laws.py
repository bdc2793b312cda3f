"""Data Mixing Laws: swarms or a person's runs -> a law for each loss -> the best mixture."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, MixtureWarning, Stopwatch
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.fits.judgement import judged
from megatron_chameleon.methods.fits.outcome import FoundMixture, write_found
from megatron_chameleon.methods.fits.runs import (
    FittedRuns,
    check_options,
    drawn_mixtures,
    given_runs,
    is_first_process,
    trained_runs,
    work_dir_of,
)
from megatron_chameleon.methods.fits.sizes_and_steps import check_laws_of_growth, grown
from megatron_chameleon.methods.fits.target import check_target, target_shares
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    fit_linear,
    folds_of,
    held_out_predictions,
)
from megatron_chameleon.mixture.law_optimum import LawOptimum, law_optimum
from megatron_chameleon.mixture.mixing_laws import (
    LawSettings,
    MixingLaws,
    fit_mixing_laws,
    refit_mixing_laws,
)
from megatron_chameleon.progress import progress_bar

FEWEST_RUNS = 4
# Each run is left out by itself up to so many; more are left out in groups, for the time it takes.
MOST_FOLDS = 128
SECONDS_WITHOUT_BAR = 2.0


def compute_mixing_laws(options: MixingLawsOptions) -> bool:
    """Train or read the runs, fit them, write the mixture. Every rank calls this.

    Returns:
        Whether there is a mixture, the same on every rank; there is none if the swarm was asked to
        stop.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    corpus = Corpus.load(options.corpus)
    check_mixing_laws(options, corpus)
    if options.ratios is None or options.metrics is None:
        swarms = train_swarms(options, corpus)
        if swarms is None:
            return False
        if is_first_process():
            fit_and_write(options, corpus, joined_runs(options, corpus, swarms))
    elif is_first_process():
        fit_and_write(options, corpus, given_runs(options.ratios, options.metrics, corpus))
    return True


def check_mixing_laws(options: MixingLawsOptions, corpus: Corpus) -> None:
    """Raises UserError for what could only fail after the proxies have been trained."""
    check_options(options)
    check_laws(options.laws)
    check_laws_of_growth(options)
    limit_of(options, corpus, corpus.names).check()
    if options.ratios is None:
        check_target(options.target, corpus.names)
        check_number_of_runs(options.num_proxies)


def check_laws(options: LawOptions) -> None:
    """Raises UserError for a number that no fit can have."""
    for flag, value, least in (
        ("--num-starts", options.num_starts, 1),
        ("--fit-seed", options.fit_seed, 0),
    ):
        if value < least:
            raise UserError(f"{flag} {value}: give a whole number from {least} on")
    if not 0 < options.huber_delta < math.inf:
        raise UserError(f"--huber-delta {options.huber_delta}: give a finite number above 0")
    if not 0 <= options.law_ridge < math.inf:
        raise UserError(f"--law-ridge {options.law_ridge}: give a finite number from 0 on")
    most = options.max_extrapolation
    if most is not None and not 0 <= most <= 1:
        raise UserError(f"--max-extrapolation {most}: it lies between 0 and 1")


def check_number_of_runs(count: int) -> None:
    """Raises UserError for too few runs to fit a law and leave one out."""
    if count < FEWEST_RUNS:
        raise UserError(f"{count} runs are too few for a law: give {FEWEST_RUNS} or more")


def train_swarms(options: MixingLawsOptions, corpus: Corpus) -> dict[str, SwarmResult] | None:
    """Name of a size -> its swarm; None if one was asked to stop. Every rank calls this."""
    from megatron_chameleon.methods.swarm.train import train_swarm

    mixtures = drawn_mixtures(options.draws, options.num_proxies, corpus)
    swarms: dict[str, SwarmResult] = {}
    for size in options.laws.model_sizes or (options.swarm.model_size,):
        settings = dataclasses.replace(options.swarm, model_size=size)
        found = train_swarm(settings, corpus, mixtures, work_dir_of(options) / f"swarm-{size}")
        if found is None:
            return None
        swarms[size] = found
    return swarms


def joined_runs(
    options: MixingLawsOptions, corpus: Corpus, swarms: dict[str, SwarmResult]
) -> FittedRuns:
    """The runs of all sizes as one: their losses at the target, what they cost together."""
    first = next(iter(swarms.values()))
    diverged = sorted({number for swarm in swarms.values() for number in swarm.diverged})
    cost = sum((swarm.cost for swarm in swarms.values()), Cost())
    together = dataclasses.replace(first, diverged=diverged, cost=cost)
    predicted = grown(options, corpus, swarms)
    folders = [work_dir_of(options) / f"swarm-{size}" for size in swarms]
    fitted = trained_runs(together, predicted.losses, folders)
    return dataclasses.replace(
        fitted,
        told="\n".join([fitted.told, *predicted.told]),
        parameters={**fitted.parameters, **predicted.parameters},
    )


def fit_and_write(options: MixingLawsOptions, corpus: Corpus, fitted: FittedRuns) -> None:
    """Fit the runs and write the mixture, on one rank."""
    stopwatch, runs = Stopwatch(), fitted.runs
    check_number_of_runs(len(runs.keys))
    _tell_of_few(runs)
    shares = target_shares(options.target, runs.metrics)
    settings = LawSettings(
        huber_delta=options.laws.huber_delta,
        ridge=options.laws.law_ridge,
        num_starts=options.laws.num_starts,
        seed=options.laws.fit_seed,
    )
    laws = _fitted(runs, settings)
    folds = folds_of(len(runs.keys), min(len(runs.keys), MOST_FOLDS), settings.seed)
    with progress_bar(len(folds), " fits", "measuring the fit", delay=SECONDS_WITHOUT_BAR) as bar:
        held_out = held_out_predictions(
            lambda mixtures, losses: refit_mixing_laws(laws, mixtures, losses, settings).predict,
            runs.mixtures,
            runs.losses,
            folds,
            on_fold=bar.update,
        )
    linear = held_out_predictions(fit_linear, runs.mixtures, runs.losses, folds)
    optimum = _optimum(laws, shares, runs, options.laws.max_extrapolation)
    found = FoundMixture(
        method="mixing-laws",
        heading=f"Data Mixing Laws: {len(runs.metrics)} laws over {len(corpus.names)} domains, "
        f"their optimum by a grid of 1/{optimum.grid_steps} and a descent",
        weights=optimum.weights,
        shares=shares,
        judgement=judged(
            held_out,
            linear,
            runs.losses,
            shares,
            "leave one out"
            if len(folds) == len(runs.keys)
            else f"{len(folds)}-fold cross-validation",
        ),
        predict=laws.predict,
        parameters={
            "laws": _law_parameters(laws, corpus.names, runs.metrics),
            "grid_optimum": dict(zip(corpus.names, optimum.grid_weights.tolist(), strict=True)),
            "predicted_target": optimum.predicted,
            "predicted_target_on_grid": optimum.grid_predicted,
        },
        remedy="more runs, or a larger --law-ridge, may help",
    )
    write_found(found, options, corpus, fitted, stopwatch.cost())


def _fitted(runs: MixtureRuns, settings: LawSettings) -> MixingLaws:
    with progress_bar(len(runs.metrics), " laws", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
        try:
            return fit_mixing_laws(runs.mixtures, runs.losses, settings, on_fit=bar.update)
        except ValueError as error:
            raise UserError(
                f"no law can be fitted: {error}; leave such columns out of --metrics"
            ) from error


def _optimum(
    laws: MixingLaws, shares: Array, runs: MixtureRuns, margin: float | None
) -> LawOptimum:
    """The best mixture; domains of which no run had any text stay without."""
    trained = runs.mixtures
    low, high = np.zeros(trained.shape[1]), np.any(trained, axis=0).astype(np.float64)
    if margin is not None:
        low = np.maximum(trained.min(axis=0) - margin, 0.0) * high
        high = np.minimum(trained.max(axis=0) + margin, 1.0) * high
    return law_optimum(laws, shares, low, high, start=np.mean(trained, axis=0))


def _law_parameters(
    laws: MixingLaws, domains: list[str], metrics: list[str]
) -> dict[str, dict[str, object]]:
    """Loss -> its law, for the mixture's file."""
    return {
        metric: {
            "constant": float(laws.constant[row]),
            "scale": float(laws.scale[row]),
            "exponents": dict(zip(domains, laws.exponents[row].tolist(), strict=True)),
        }
        for row, metric in enumerate(metrics)
    }


def _tell_of_few(runs: MixtureRuns) -> None:
    """A law has a constant, a scale and an exponent a domain; the ridge alone decides the rest."""
    unknowns = runs.mixtures.shape[1] + 2
    if len(runs.keys) < unknowns:
        warnings.warn(
            f"{len(runs.keys)} runs for laws of {unknowns} unknowns each: --law-ridge decides much "
            "of them; see the error on runs left out, or train more proxies",
            MixtureWarning,
            stacklevel=2,
        )
