"""RegMix: a swarm or a person's runs -> trees -> the mixture that they predict to be best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.table import share_of_tokens
from megatron_chameleon.methods.common.work_dir import work_dir_of
from megatron_chameleon.methods.fits.compute import SECONDS_WITHOUT_BAR, FitMethod, compute_fit
from megatron_chameleon.methods.fits.outcome import Fitted
from megatron_chameleon.methods.fits.runs import (
    FittedRuns,
    drawn_mixtures,
    paper_flops_of,
    prior_of,
    trained_runs,
)
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, folds_of
from megatron_chameleon.mixture.regmix import (
    DrawnOptimum,
    TreeSettings,
    drawn_optimum,
    fit_trees,
    runs_in_leaf,
)
from megatron_chameleon.options.ranges import check_ranges
from megatron_chameleon.progress import progress_bar

NAME, SWARM = "regmix", "swarm"
MOST_SPREAD = 3


def compute_regmix(options: RegmixOptions) -> bool:
    """As :func:`~megatron_chameleon.methods.fits.compute.compute_fit`."""
    return compute_fit(REGMIX, options)


def check_regmix(options: RegmixOptions) -> None:
    """Raises UserError for a number that no fit can have, or without LightGBM."""
    check_trees(options.trees)
    check_lightgbm()


def check_trees(options: TreeOptions) -> None:
    """Raises UserError for a number that no fit can have."""
    check_ranges(options)
    if options.num_best > options.num_draws:
        raise UserError(
            f"--num-best {options.num_best} of --num-draws {options.num_draws}: take fewer"
        )


def check_lightgbm() -> None:
    """Raises UserError where LightGBM is not there or lacks the OpenMP library."""
    try:
        import lightgbm  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--method regmix needs LightGBM ({error}): pip install lightgbm"
        ) from error
    except OSError as error:
        raise UserError(
            f"LightGBM cannot be loaded ({error}); install the OpenMP library that it needs, such "
            "as by apt-get install libgomp1"
        ) from error


def check_number_of_runs(options: TreeOptions, count: int) -> None:
    """Raises UserError for so few runs that no tree can split them, within a fold or at all."""
    left = count - -(-count // options.folds)
    needed = 2 * runs_in_leaf(_settings(options), left)
    if count < options.folds or left < needed:
        raise UserError(
            f"{count} runs are too few for trees: without one of --folds {options.folds} there are "
            f"{max(left, 0)}, and leaves of {needed // 2} need {needed}; give more runs, or a "
            "smaller --min-runs-in-leaf"
        )


def train_runs(options: RegmixOptions, corpus: Corpus) -> FittedRuns | None:
    """The swarm's runs; None if it was asked to stop. Every rank calls this."""
    from megatron_chameleon.methods.swarm.train import train_swarm

    mixtures = drawn_mixtures(options.draws, options.num_proxies, corpus)
    folder = work_dir_of(options.output, options.work_dir) / SWARM
    result = train_swarm(options.swarm, corpus, mixtures, folder)
    if result is None:
        return None
    by_paper = paper_flops_of(NAME, options.swarm, options.num_proxies)
    return trained_runs(result, result.losses[:, -1], [folder], by_paper)


def fit_runs(options: RegmixOptions, corpus: Corpus, runs: MixtureRuns, shares: Array) -> Fitted:
    """Trees for every loss, and the mean of the mixtures that they think best."""
    trees, settings = options.trees, _settings(options.trees)
    optimum, predict = _optimum(runs, shares, _search_prior(corpus, runs), trees, settings)

    def refit(mixtures: Array, losses: Array, on_fit: Callable[[], object]) -> Predict:
        return fit_trees(mixtures, losses, settings, on_fit)

    return Fitted(
        heading=f"RegMix: mean of the {trees.num_best} best of {trees.num_draws:,} mixtures by "
        f"{trees.num_trees} trees a loss",
        weights=optimum.weights,
        predict=predict,
        refit=refit,
        parameters={
            **_parameters_of(corpus.names, optimum),
            "runs_in_leaf": runs_in_leaf(settings, len(runs.keys)),
        },
        remedy="more runs may help",
        told=(_spread_told(corpus.names, optimum),),
    )


def _parameters_of(names: Sequence[str], optimum: DrawnOptimum) -> dict[str, object]:
    """The best draws, for the mixture's file."""
    ranges = np.column_stack([optimum.low, optimum.high]).tolist()
    return {
        "spread_of_the_best": dict(zip(names, optimum.spread.tolist(), strict=True)),
        "range_of_the_best": dict(zip(names, ranges, strict=True)),
        "predicted_target_of_the_best": optimum.predicted_best,
        "predicted_target_of_all_draws": optimum.predicted_all,
    }


def _spread_told(names: Sequence[str], optimum: DrawnOptimum) -> str:
    """The weights of which the best draws are least of one mind."""
    widest = np.argsort(-(optimum.high - optimum.low), kind="stable")[:MOST_SPREAD]
    shown = ", ".join(
        f"{names[place]} {share_of_tokens(optimum.low[place])} to "
        f"{share_of_tokens(optimum.high[place])}"
        for place in widest
    )
    return f"nine in ten of the best draws have {shown}"


def _settings(options: TreeOptions) -> TreeSettings:
    return TreeSettings(
        num_trees=options.num_trees,
        learning_rate=options.tree_learning_rate,
        min_runs_in_leaf=options.min_runs_in_leaf,
        seed=options.fit_seed,
    )


def _search_prior(corpus: Corpus, runs: MixtureRuns) -> Array:
    """The domains' shares of the tokens; nothing for a domain of which no run had any text."""
    shares: Array = prior_of(corpus) * runs.mixtures.any(axis=0)
    if not shares.any():
        raise UserError(f"no domain of the runs has training tokens in {corpus.root}")
    return shares


def _optimum(
    runs: MixtureRuns, shares: Array, prior: Array, options: TreeOptions, settings: TreeSettings
) -> tuple[DrawnOptimum, Predict]:
    """The best mixture, and what predicts all losses."""
    wanted, rest = np.flatnonzero(shares), np.flatnonzero(shares == 0)
    with progress_bar(len(shares), " fits", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
        # What is sought among many draws is predicted from the target's own trees alone.
        of_target, of_rest = (
            fit_trees(runs.mixtures, runs.losses[:, columns], settings, on_fit=bar.update)
            for columns in (wanted, rest)
        )
    with progress_bar(
        options.num_draws, " mixtures", "searching", delay=SECONDS_WITHOUT_BAR
    ) as bar:
        optimum = drawn_optimum(
            lambda mixtures: of_target(mixtures) @ shares[wanted],
            prior,
            num_draws=options.num_draws,
            num_best=options.num_best,
            seed=options.fit_seed,
            on_draws=bar.update,
        )

    def predict(mixtures: Array) -> Array:
        losses = np.empty((len(mixtures), len(shares)))
        losses[:, wanted] = of_target(mixtures)
        losses[:, rest] = of_rest(mixtures)
        return losses

    return optimum, predict


REGMIX = FitMethod[RegmixOptions](
    name=NAME,
    check=check_regmix,
    check_number_of_runs=lambda options, count: check_number_of_runs(options.trees, count),
    train=train_runs,
    fit=fit_runs,
    folds=lambda options, count: folds_of(count, options.trees.folds, options.trees.fit_seed),
)
