"""RegMix: fit gradient-boosted trees to the losses of runs, and find the best predicted mixture."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.methods.output import by_name, format_weight
from megatron_chameleon.methods.regmix import RegmixOptions
from megatron_chameleon.methods.swarm.fit import FitMethod, Fitted
from megatron_chameleon.methods.swarm.sampling import require_lightgbm
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import folds_of
from megatron_chameleon.mixture.regmix import (
    TreeSettings,
    fit_trees,
    runs_in_leaf,
    sampled_optimum,
)
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

# Print the ranges of this many domains: those whose weights vary most among the best mixtures.
MAX_RANGES = 3


class Regmix(FitMethod[RegmixOptions]):
    """RegMix: fit trees to each loss, and average the mixtures with the lowest predictions."""

    name = "regmix"

    def __init__(self, options: RegmixOptions) -> None:
        super().__init__(options)
        require_lightgbm(f"--method {self.name}")
        trees = options.trees
        self.settings = TreeSettings(
            num_trees=trees.num_trees,
            learning_rate=trees.tree_learning_rate,
            min_runs_in_leaf=trees.min_runs_in_leaf,
            seed=trees.fit_seed,
        )

    def check_number_of_runs(self, count: int) -> None:
        """Raise UserError if a tree cannot split the runs that are left when a fold is held out."""
        folds = self.options.trees.folds
        left = count - -(-count // folds)
        needed = 2 * runs_in_leaf(self.settings, left)
        if count < folds or left < needed:
            raise UserError(
                f"{count} runs are too few for trees: with --folds {folds}, trees are fitted to "
                f"{max(left, 0)} runs, but a split into two leaves of {needed // 2} runs needs "
                f"{needed} runs; add runs, or lower --min-runs-in-leaf"
            )

    def fit(self, table: MixtureRuns, shares: Array) -> Fitted:
        """Fit trees to every loss; average the mixtures with the lowest predicted target loss.

        Losses outside the target have separate trees, which the search does not evaluate.
        """
        trees, settings = self.options.trees, self.settings
        prior = self.token_shares * table.mixtures.any(axis=0)
        if not prior.any():
            raise UserError(f"no domain of the runs has training tokens in {self.corpus.root}")
        in_target, others = np.flatnonzero(shares), np.flatnonzero(shares == 0)
        with progress_bar(len(shares), " fits", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
            of_target, of_others = (
                fit_trees(table.mixtures, table.losses[:, columns], settings, on_fit=bar.update)
                for columns in (in_target, others)
            )
        total = trees.num_draws
        with progress_bar(total, " mixtures", "searching", delay=SECONDS_WITHOUT_BAR) as bar:
            optimum = sampled_optimum(
                lambda mixtures: of_target(mixtures) @ shares[in_target],
                prior,
                num_draws=trees.num_draws,
                num_best=trees.num_best,
                seed=trees.fit_seed,
                on_draws=bar.update,
            )

        def predict(mixtures: Array) -> Array:
            losses = np.empty((len(mixtures), len(shares)))
            losses[:, in_target] = of_target(mixtures)
            losses[:, others] = of_others(mixtures)
            return losses

        folds = folds_of(len(table.keys), trees.folds, trees.fit_seed)
        names, low, high = self.space.names, optimum.low, optimum.high
        ranges = ", ".join(
            f"{names[at]} {format_weight(low[at])} to {format_weight(high[at])}"
            for at in np.argsort(low - high, kind="stable")[:MAX_RANGES]
        )
        return Fitted(
            heading=f"RegMix: mean of the {trees.num_best} best of {trees.num_draws:,} mixtures, "
            f"whose losses are predicted by {trees.num_trees} trees per loss",
            optimum=self.within_epochs(optimum.weights),
            free_optimum=optimum.weights,
            predict=predict,
            held_out=self.hold_out(lambda x, y: fit_trees(x, y, settings), table, folds),
            folds=folds,
            parameters={
                "spread_of_the_best": by_name(names, optimum.spread),
                "range_of_the_best": by_name(names, np.column_stack([low, high])),
                "predicted_target_of_the_best": optimum.predicted_best,
                "predicted_target_of_all_draws": optimum.predicted_all,
                "runs_in_leaf": runs_in_leaf(settings, len(table.keys)),
            },
            remedy="more runs may help",
            closing=(f"middle 90% of the weights in the best mixtures: {ranges}",),
        )
