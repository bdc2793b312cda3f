"""Data Mixing Laws: runs of swarms or of the user's tables, a law per loss, and the best mixture.

Ye et al.: Data Mixing Laws, ICLR 2025. Section 4 first carries the losses to the target's steps and
model size: step law, then size law, then mixing law.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, MixtureWarning
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.mixing_laws import (
    MIN_POINTS,
    LawOptions,
    MixingLawsOptions,
    layer_parameters,
)
from megatron_chameleon.methods.proxy import resolve_work_dir
from megatron_chameleon.methods.swarm.fit import (
    SECONDS_WITHOUT_BAR,
    FitMethod,
    Fitted,
    compute_fit,
    mixtures_to_train,
    swarm_paper_flops,
)
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.runs import FitRuns, swarm_runs
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, folds_of
from megatron_chameleon.mixture.mixing_laws import (
    LawSettings,
    MixingLaws,
    PowerLaws,
    fit_mixing_laws,
    fit_power_laws,
    law_optimum,
    refit_mixing_laws,
)
from megatron_chameleon.progress import progress_bar

NAME = "mixing-laws"
MIN_RUNS = 4
# Up to so many runs, each is held out alone; more are held out in groups, to save time.
MAX_FOLDS = 128


def compute_mixing_laws(options: MixingLawsOptions) -> bool:
    """See :func:`~megatron_chameleon.methods.swarm.fit.compute_fit`."""
    return compute_fit(MIXING_LAWS, options)


def check_number_of_runs(count: int) -> None:
    """Raise UserError for too few runs to fit a law with one held out."""
    if count < MIN_RUNS:
        raise UserError(f"{count} runs are too few for a law; use {MIN_RUNS} or more")


def train_runs(options: MixingLawsOptions, corpus: Corpus) -> FitRuns | None:
    """Train a swarm per size; None after a stop request. Every rank calls this."""
    from megatron_chameleon.methods.swarm.train import train_swarm

    mixtures = mixtures_to_train(options, corpus)
    folder = resolve_work_dir(options.output, options.work_dir)
    swarms: dict[str, SwarmResult] = {}
    flops = 0.0
    for size in options.laws.model_sizes or (options.swarm.model_size,):
        settings = dataclasses.replace(options.swarm, model_size=size)
        found = train_swarm(settings, corpus, mixtures, folder / f"swarm-{size}")
        if found is None:
            return None
        swarms[size] = found
        flops += swarm_paper_flops(NAME, settings, options.num_proxies)
    joined = dataclasses.replace(
        next(iter(swarms.values())),
        diverged=sorted({number for swarm in swarms.values() for number in swarm.diverged}),
        cost=sum((swarm.cost for swarm in swarms.values()), Cost()),
    )
    losses, lines, parameters = extrapolated(options, swarms)
    runs = swarm_runs(joined, losses, [folder / f"swarm-{size}" for size in swarms], flops)
    return dataclasses.replace(
        runs,
        origin="\n".join([runs.origin, *lines]),
        parameters={**runs.parameters, **parameters},
    )


def extrapolated(
    options: MixingLawsOptions, swarms: dict[str, SwarmResult]
) -> tuple[Array, list[str], dict[str, Any]]:
    """Predict the losses at the target's steps and size.

    Args:
        options: of the method.
        swarms: model size -> its swarm, all on the same mixtures.

    Returns:
        Losses [n, k], NaN where a member of any size diverged; lines for the user; parameters for
        the mixture's file.
    """
    lines: list[str] = []
    parameters: dict[str, Any] = {}
    by_size = {}
    for name, swarm in swarms.items():
        by_size[name] = swarm.losses[:, -1]
        if options.laws.target_steps is not None:
            by_size[name], law, error = _at_target_steps(options, swarm)
            ahead = "" if error is None else f"; its error on the last one is {error:.4f}"
            lines.append(
                f"losses of {name} at step {options.laws.target_steps:,} by a power law of exponent"
                f" {law.exponent:.3g} over the measurements{ahead}"
            )
            parameters[f"step_law_{name}"] = {"exponent": law.exponent, "backtest_mae": error}
    if options.laws.target_size is None:
        (losses,) = by_size.values()
        return losses, lines, parameters
    names = sorted(by_size, key=layer_parameters)
    curves, finite = _curves(np.stack([by_size[name] for name in names], axis=2))
    law = fit_power_laws(np.array([layer_parameters(name) for name in names]), curves)
    losses = np.full(finite.shape, np.nan)
    losses[finite] = law.predict(layer_parameters(options.laws.target_size))
    lines.append(
        f"losses of {options.laws.target_size} by a power law of exponent {law.exponent:.3g} over "
        f"{', '.join(by_size)}"
    )
    parameters["size_law"] = {"exponent": law.exponent, "sizes": list(by_size)}
    return losses, lines, parameters


def _at_target_steps(
    options: MixingLawsOptions, swarm: SwarmResult
) -> tuple[Array, PowerLaws, float | None]:
    """Losses [n, k] at the target's steps, the law, and its mean error one measurement ahead.

    The error is of a law over all measurements but the last; None where these are too few.
    """
    steps = np.array(swarm.steps, np.float64)
    used = steps >= options.first_step
    curves, finite = _curves(swarm.losses[:, used].swapaxes(1, 2))
    law = fit_power_laws(steps[used], curves)
    losses = np.full(finite.shape, np.nan)
    losses[finite] = law.predict(float(options.laws.target_steps or 0))
    before = steps[used][:-1]
    if len(before) < MIN_POINTS:
        return losses, law, None
    ahead = fit_power_laws(before, curves[:, :-1]).predict(steps[-1])
    return losses, law, float(np.abs(ahead - curves[:, -1]).mean())


def _curves(losses: Array) -> tuple[Array, Array]:
    """Finite curves [curves, points] of ``losses`` [n, k, points], and a mask [n, k] of them."""
    finite = np.all(np.isfinite(losses), axis=2)
    return losses[finite], finite


def fit_runs(
    options: MixingLawsOptions, corpus: Corpus, runs: MixtureRuns, shares: Array
) -> Fitted:
    """A law for every loss, and their optimum."""
    unknowns = runs.mixtures.shape[1] + 2  # a constant, a scale, and an exponent per domain
    if len(runs.keys) < unknowns:
        warnings.warn(
            f"{len(runs.keys)} runs for laws of {unknowns} unknowns each, mostly set by "
            "--law-ridge: check the error on held-out runs, or train more proxies",
            MixtureWarning,
            stacklevel=2,
        )
    settings = _settings(options.laws)
    with progress_bar(len(runs.metrics), " laws", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
        try:
            laws = fit_mixing_laws(runs.mixtures, runs.losses, settings, on_fit=bar.update)
        except ValueError as error:
            raise UserError(f"no law fits: {error}; leave such columns out of --metrics") from error
    low, high = _bounds(runs.mixtures, options.laws.max_extrapolation)
    optimum = law_optimum(laws, shares, low, high, start=np.mean(runs.mixtures, axis=0))

    def refit(mixtures: Array, losses: Array, on_fit: Callable[[], object]) -> Predict:
        return refit_mixing_laws(laws, mixtures, losses, settings, on_fit).predict

    return Fitted(
        heading=f"Data Mixing Laws: {len(runs.metrics)} laws over {len(corpus.names)} domains, "
        f"minimized by a grid of 1/{optimum.grid_steps} and a descent",
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


def _bounds(trained: Array, margin: float | None) -> tuple[Array, Array]:
    """Lower and upper weights [k]; domains without text in any run stay at 0."""
    low, high = np.zeros(trained.shape[1]), np.any(trained, axis=0).astype(np.float64)
    if margin is not None:
        low = np.maximum(trained.min(axis=0) - margin, 0.0) * high
        high = np.minimum(trained.max(axis=0) + margin, 1.0) * high
    return low, high


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


MIXING_LAWS = FitMethod[MixingLawsOptions](
    name=NAME,
    check=lambda _options: None,
    check_number_of_runs=lambda _options, count: check_number_of_runs(count),
    train=train_runs,
    fit=fit_runs,
    folds=lambda options, count: folds_of(count, min(count, MAX_FOLDS), options.laws.fit_seed),
)
