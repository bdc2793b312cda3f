"""RegMix: a swarm or a person's runs -> trees -> the mixture that they predict to be best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_chameleon.artifacts import Corpus, Stopwatch
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.table import share_of_tokens
from megatron_chameleon.methods.fits.judgement import judged
from megatron_chameleon.methods.fits.outcome import FoundMixture, write_found
from megatron_chameleon.methods.fits.runs import (
    FittedRuns,
    check_options,
    drawn_mixtures,
    given_runs,
    is_first_process,
    prior_of,
    trained_runs,
    work_dir_of,
)
from megatron_chameleon.methods.fits.target import check_target, target_shares
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import (
    Predict,
    fit_linear,
    folds_of,
    held_out_predictions,
)
from megatron_chameleon.mixture.regmix import (
    DrawnOptimum,
    TreeSettings,
    drawn_optimum,
    fit_trees,
    runs_in_leaf,
)
from megatron_chameleon.progress import progress_bar

SWARM = "swarm"
SECONDS_WITHOUT_BAR = 2.0
MOST_SPREAD = 3


def compute_regmix(options: RegmixOptions) -> bool:
    """Train or read the runs, fit them, write the mixture. Every rank calls this.

    Returns:
        Whether there is a mixture, the same on every rank; there is none if the swarm was asked to
        stop.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    corpus = Corpus.load(options.corpus)
    check_regmix(options, corpus)
    if options.ratios is None or options.metrics is None:
        fitted = train_runs(options, corpus)
        if fitted is None:
            return False
    elif is_first_process():
        fitted = given_runs(options.ratios, options.metrics, corpus)
    else:
        return True
    if is_first_process():
        fit_and_write(options, corpus, fitted)
    return True


def check_regmix(options: RegmixOptions, corpus: Corpus) -> None:
    """Raises UserError for what could only fail after the proxies have been trained."""
    check_options(options)
    check_trees(options.trees)
    check_lightgbm()
    limit_of(options, corpus, corpus.names).check()
    if options.ratios is None:
        check_target(options.target, corpus.names)
        check_number_of_runs(options.trees, options.num_proxies)


def check_trees(options: TreeOptions) -> None:
    """Raises UserError for a number that no fit can have."""
    for flag, value, least in (
        ("--num-trees", options.num_trees, 1),
        ("--min-runs-in-leaf", options.min_runs_in_leaf, 1),
        ("--fit-seed", options.fit_seed, 0),
        ("--folds", options.folds, 2),
        ("--num-draws", options.num_draws, 1),
        ("--num-best", options.num_best, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: give a whole number from {least} on")
    if not 0 < options.tree_learning_rate <= 1:
        raise UserError(
            f"--tree-learning-rate {options.tree_learning_rate}: it lies above 0, at most at 1"
        )
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
    folder = work_dir_of(options) / SWARM
    result = train_swarm(options.swarm, corpus, mixtures, folder)
    return None if result is None else trained_runs(result, result.losses[:, -1], [folder])


def fit_and_write(options: RegmixOptions, corpus: Corpus, fitted: FittedRuns) -> None:
    """Fit the runs and write the mixture, on one rank."""
    stopwatch, runs, trees = Stopwatch(), fitted.runs, options.trees
    check_number_of_runs(trees, len(runs.keys))
    shares = target_shares(options.target, runs.metrics)
    settings = _settings(trees)
    optimum, predict = _optimum(runs, shares, _search_prior(corpus, runs), trees, settings)
    folds = folds_of(len(runs.keys), trees.folds, trees.fit_seed)
    with progress_bar(
        trees.folds * len(runs.metrics), " fits", "measuring the fit", delay=SECONDS_WITHOUT_BAR
    ) as bar:
        held_out = held_out_predictions(
            lambda x, y: fit_trees(x, y, settings, on_fit=bar.update),
            runs.mixtures,
            runs.losses,
            folds,
        )
    linear = held_out_predictions(fit_linear, runs.mixtures, runs.losses, folds)
    found = FoundMixture(
        method="regmix",
        heading=f"RegMix: mean of the {trees.num_best} best of {trees.num_draws:,} mixtures by "
        f"{trees.num_trees} trees a loss",
        weights=optimum.weights,
        shares=shares,
        judgement=judged(
            held_out, linear, runs.losses, shares, f"{trees.folds}-fold cross-validation"
        ),
        predict=predict,
        parameters={
            "spread_of_the_best": dict(zip(corpus.names, optimum.spread.tolist(), strict=True)),
            "range_of_the_best": dict(
                zip(
                    corpus.names,
                    np.column_stack([optimum.low, optimum.high]).tolist(),
                    strict=True,
                )
            ),
            "runs_in_leaf": runs_in_leaf(settings, len(runs.keys)),
            "predicted_target_of_the_best": optimum.predicted_best,
            "predicted_target_of_all_draws": optimum.predicted_all,
        },
        remedy="more runs may help",
        told=(_spread_told(corpus.names, optimum),),
    )
    write_found(found, options, corpus, fitted, stopwatch.cost())


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
