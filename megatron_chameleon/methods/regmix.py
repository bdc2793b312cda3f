"""RegMix: the mixture that a regression over many tiny proxies predicts to be best.

Liu et al.: RegMix, ICLR 2025.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.fits import FitOptions
from megatron_chameleon.options.ranges import (
    Count,
    PositiveShare,
    Repetitions,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class TreeOptions:
    """The regression (LightGBM), and the search for its optimum."""

    num_trees: Count = 1000
    """Trees of each regression; their number is fixed, nothing stops early (RegMix: 1000)."""
    tree_learning_rate: PositiveShare = 0.01
    """How much of a tree counts (RegMix: 0.01)."""
    min_runs_in_leaf: Count | None = None
    """Runs that a leaf of a tree holds at least; unless given LightGBM's 20, and an eighth of the
    runs where there are fewer than 160."""
    fit_seed: Seed = 42
    """Of the trees, the folds and the draws among which the optimum is sought (RegMix: 42)."""
    folds: SeveralRepetitions = 5
    """Parts that the runs are cut into to measure the fit: each is predicted from the others."""
    num_draws: Repetitions = 100_000
    """Mixtures drawn around the domains' shares of the tokens to find the best (RegMix: 100k)."""
    num_best: Repetitions = 128
    """The mean of so many of the best draws is the mixture (RegMix: 128)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegmixOptions(FitOptions):
    """Train many tiny proxies on drawn mixtures, fit their losses, and take the best mixture.

    With --ratios and --metrics, runs that are there are fitted instead.
    """

    num_proxies: Repetitions = 512
    """Proxies to train, each on a mixture of its own (RegMix: 512; Chameleon's paper: 200)."""
    trees: TreeOptions = dataclasses.field(default_factory=TreeOptions)


def compute(options: RegmixOptions) -> int | None:
    """Train what is to be trained, fit it and write the mixture, unless asked to stop before."""
    from megatron_chameleon.methods.fits.regmix import compute_regmix

    return None if compute_regmix(options) else STOPPED_STATUS


METHOD = Method(
    name="regmix",
    options=RegmixOptions,
    compute=compute,
    summary="what a regression over many tiny proxies predicts to be best for a target",
    needs="nothing beside the corpus; or results of runs on many mixtures (--ratios, --metrics)",
    cost="hundreds of tiny proxies (--num-proxies), trained together",
    good_for="a known target, a few dozen domains at most; reusing runs that are there",
    source="Liu et al.: RegMix, ICLR 2025",
)
