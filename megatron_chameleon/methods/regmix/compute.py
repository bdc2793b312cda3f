"""RegMix: runs of a swarm or of the user's tables, trees, and the best mixture they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.output import format_weight
from megatron_chameleon.methods.proxy import resolve_work_dir
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.methods.swarm.fit import (
    SECONDS_WITHOUT_BAR,
    FitMethod,
    Fitted,
    compute_fit,
    mixtures_to_train,
    swarm_paper_flops,
)
from megatron_chameleon.methods.swarm.runs import FitRuns, swarm_runs, token_shares
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, folds_of
from megatron_chameleon.mixture.regmix import (
    SampledOptimum,
    TreeSettings,
    fit_trees,
    runs_in_leaf,
    sampled_optimum,
)
from megatron_chameleon.progress import progress_bar

NAME, SWARM = "regmix", "swarm"
# Domains whose ranges among the best mixtures are printed.
MAX_RANGES = 3


def compute_regmix(options: RegmixOptions) -> bool:
    """See :func:`~megatron_chameleon.methods.swarm.fit.compute_fit`."""
    return compute_fit(REGMIX, options)


def check_lightgbm() -> None:
    """Raise UserError if LightGBM, or the OpenMP library that it needs, is missing."""
    try:
        import lightgbm  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--method regmix needs LightGBM ({error}): pip install lightgbm"
        ) from error
    except OSError as error:
        raise UserError(
            f"LightGBM cannot be loaded ({error}); install OpenMP: apt-get install libgomp1"
        ) from error


def check_number_of_runs(options: TreeOptions, count: int) -> None:
    """Raise UserError if no tree could split the runs outside of a fold."""
    left = count - -(-count // options.folds)
    needed = 2 * runs_in_leaf(_settings(options), left)
    if count < options.folds or left < needed:
        raise UserError(
            f"{count} runs are too few for trees: outside of one of --folds {options.folds} there "
            f"are {max(left, 0)}, and leaves of {needed // 2} need {needed}; add runs, or lower "
            "--min-runs-in-leaf"
        )


def train_runs(options: RegmixOptions, corpus: Corpus) -> FitRuns | None:
    """Train the swarm; None after a stop request. Every rank calls this."""
    from megatron_chameleon.methods.swarm.train import train_swarm

    mixtures = mixtures_to_train(options, corpus)
    folder = resolve_work_dir(options.output, options.work_dir) / SWARM
    result = train_swarm(options.swarm, corpus, mixtures, folder)
    if result is None:
        return None
    flops = swarm_paper_flops(NAME, options.swarm, options.num_proxies)
    return swarm_runs(result, result.losses[:, -1], [folder], flops)


def fit_runs(options: RegmixOptions, corpus: Corpus, runs: MixtureRuns, shares: Array) -> Fitted:
    """Trees for every loss, and the mean of the mixtures that they predict to be best."""
    trees, settings = options.trees, _settings(options.trees)
    optimum, predict = _optimum(runs, shares, _prior(corpus, runs), trees, settings)

    def refit(mixtures: Array, losses: Array, on_fit: Callable[[], object]) -> Predict:
        return fit_trees(mixtures, losses, settings, on_fit)

    names = corpus.names
    ranges = np.column_stack([optimum.low, optimum.high]).tolist()
    return Fitted(
        heading=f"RegMix: mean of the {trees.num_best} best of {trees.num_draws:,} mixtures by "
        f"{trees.num_trees} trees per loss",
        weights=optimum.weights,
        predict=predict,
        refit=refit,
        parameters={
            "spread_of_the_best": dict(zip(names, optimum.spread.tolist(), strict=True)),
            "range_of_the_best": dict(zip(names, ranges, strict=True)),
            "predicted_target_of_the_best": optimum.predicted_best,
            "predicted_target_of_all_draws": optimum.predicted_all,
            "runs_in_leaf": runs_in_leaf(settings, len(runs.keys)),
        },
        remedy="more runs may help",
        closing=(_widest_ranges(names, optimum),),
    )


def _widest_ranges(names: Sequence[str], optimum: SampledOptimum) -> str:
    """A line with the weights that differ most among the best mixtures."""
    widest = np.argsort(-(optimum.high - optimum.low), kind="stable")[:MAX_RANGES]
    ranges = ", ".join(
        f"{names[at]} {format_weight(optimum.low[at])} to {format_weight(optimum.high[at])}"
        for at in widest
    )
    return f"90% of the best mixtures have {ranges}"


def _settings(options: TreeOptions) -> TreeSettings:
    return TreeSettings(
        num_trees=options.num_trees,
        learning_rate=options.tree_learning_rate,
        min_runs_in_leaf=options.min_runs_in_leaf,
        seed=options.fit_seed,
    )


def _prior(corpus: Corpus, runs: MixtureRuns) -> Array:
    """[k] token shares; 0 for a domain without text in any run."""
    shares: Array = token_shares(corpus) * runs.mixtures.any(axis=0)
    if not shares.any():
        raise UserError(f"no domain of the runs has training tokens in {corpus.root}")
    return shares


def _optimum(
    runs: MixtureRuns, shares: Array, prior: Array, options: TreeOptions, settings: TreeSettings
) -> tuple[SampledOptimum, Predict]:
    """The best mixture, and the predictor of all losses."""
    wanted, rest = np.flatnonzero(shares), np.flatnonzero(shares == 0)
    with progress_bar(len(shares), " fits", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
        # The search predicts the target alone, so its trees are separate.
        of_target, of_rest = (
            fit_trees(runs.mixtures, runs.losses[:, columns], settings, on_fit=bar.update)
            for columns in (wanted, rest)
        )
    with progress_bar(
        options.num_draws, " mixtures", "searching", delay=SECONDS_WITHOUT_BAR
    ) as bar:
        optimum = sampled_optimum(
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
    check=lambda _options: check_lightgbm(),
    check_number_of_runs=lambda options, count: check_number_of_runs(options.trees, count),
    train=train_runs,
    fit=fit_runs,
    folds=lambda options, count: folds_of(count, options.trees.folds, options.trees.fit_seed),
)
