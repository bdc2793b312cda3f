"""Data Mixing Laws: swarms or a person's runs -> a law for each loss -> the best mixture."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, MixtureWarning
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.work_dir import work_dir_of
from megatron_chameleon.methods.fits.compute import SECONDS_WITHOUT_BAR, FitMethod, compute_fit
from megatron_chameleon.methods.fits.outcome import Fitted
from megatron_chameleon.methods.fits.runs import (
    FittedRuns,
    drawn_mixtures,
    paper_flops_of,
    trained_runs,
)
from megatron_chameleon.methods.fits.sizes_and_steps import check_laws_of_growth, grown
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, folds_of
from megatron_chameleon.mixture.law_optimum import LawOptimum, law_optimum
from megatron_chameleon.mixture.mixing_laws import (
    LawSettings,
    MixingLaws,
    fit_mixing_laws,
    refit_mixing_laws,
)
from megatron_chameleon.options.ranges import check_ranges
from megatron_chameleon.progress import progress_bar

NAME = "mixing-laws"
FEWEST_RUNS = 4
# Each run is left out by itself up to so many; more are left out in groups, for the time it takes.
MOST_FOLDS = 128


def compute_mixing_laws(options: MixingLawsOptions) -> bool:
    """As :func:`~megatron_chameleon.methods.fits.compute.compute_fit`."""
    return compute_fit(MIXING_LAWS, options)


def check_mixing_laws(options: MixingLawsOptions) -> None:
    """Raises UserError for a number that no fit can have, or laws of growth that cannot be."""
    check_laws(options.laws)
    check_laws_of_growth(options)


def check_laws(options: LawOptions) -> None:
    """Raises UserError for a number that no fit can have."""
    check_ranges(options)


def check_number_of_runs(count: int) -> None:
    """Raises UserError for too few runs to fit a law and leave one out."""
    if count < FEWEST_RUNS:
        raise UserError(f"{count} runs are too few for a law: give {FEWEST_RUNS} or more")


def train_runs(options: MixingLawsOptions, corpus: Corpus) -> FittedRuns | None:
    """The runs of every size's swarm; None if one was asked to stop. Every rank calls this."""
    from megatron_chameleon.methods.swarm.train import train_swarm

    mixtures = drawn_mixtures(options.draws, options.num_proxies, corpus)
    folder = work_dir_of(options.output, options.work_dir)
    swarms: dict[str, SwarmResult] = {}
    by_paper = 0.0
    for size in options.laws.model_sizes or (options.swarm.model_size,):
        settings = dataclasses.replace(options.swarm, model_size=size)
        found = train_swarm(settings, corpus, mixtures, folder / f"swarm-{size}")
        if found is None:
            return None
        swarms[size] = found
        by_paper += paper_flops_of(NAME, settings, options.num_proxies)
    return joined_runs(options, swarms, by_paper)


def joined_runs(
    options: MixingLawsOptions, swarms: dict[str, SwarmResult], by_paper: float
) -> FittedRuns:
    """The runs of all sizes as one: their losses at the target, what they cost together.

    Args:
        options: what was asked for.
        swarms: name of a size -> its swarm.
        by_paper: FLOPs of them all as Chameleon's tables count them.
    """
    first = next(iter(swarms.values()))
    diverged = sorted({number for swarm in swarms.values() for number in swarm.diverged})
    cost = sum((swarm.cost for swarm in swarms.values()), Cost())
    together = dataclasses.replace(first, diverged=diverged, cost=cost)
    predicted = grown(options, swarms)
    folder = work_dir_of(options.output, options.work_dir)
    folders = [folder / f"swarm-{size}" for size in swarms]
    fitted = trained_runs(together, predicted.losses, folders, by_paper)
    return dataclasses.replace(
        fitted,
        told="\n".join([fitted.told, *predicted.told]),
        parameters={**fitted.parameters, **predicted.parameters},
    )


def fit_runs(
    options: MixingLawsOptions, corpus: Corpus, runs: MixtureRuns, shares: Array
) -> Fitted:
    """A law for every loss, and their optimum."""
    _tell_of_few(runs)
    settings = _settings(options.laws)
    laws = _fitted(runs, settings)
    optimum = _optimum(laws, shares, runs, options.laws.max_extrapolation)

    def refit(mixtures: Array, losses: Array, on_fit: Callable[[], object]) -> Predict:
        return refit_mixing_laws(laws, mixtures, losses, settings, on_fit).predict

    return Fitted(
        heading=f"Data Mixing Laws: {len(runs.metrics)} laws over {len(corpus.names)} domains, "
        f"their optimum by a grid of 1/{optimum.grid_steps} and a descent",
        weights=optimum.weights,
        predict=laws.predict,
        refit=refit,
        parameters={
            "laws": _law_parameters(laws, corpus.names, runs.metrics),
            "grid_optimum": dict(zip(corpus.names, optimum.grid_weights.tolist(), strict=True)),
            "predicted_target": optimum.predicted,
            "predicted_target_on_grid": optimum.grid_predicted,
        },
        remedy="more runs, or a larger --law-ridge, may help",
    )


def _settings(options: LawOptions) -> LawSettings:
    return LawSettings(
        huber_delta=options.huber_delta,
        ridge=options.law_ridge,
        num_starts=options.num_starts,
        seed=options.fit_seed,
    )


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


MIXING_LAWS = FitMethod[MixingLawsOptions](
    name=NAME,
    check=check_mixing_laws,
    check_number_of_runs=lambda _options, count: check_number_of_runs(count),
    train=train_runs,
    fit=fit_runs,
    folds=lambda options, count: folds_of(count, min(count, MOST_FOLDS), options.laws.fit_seed),
)
