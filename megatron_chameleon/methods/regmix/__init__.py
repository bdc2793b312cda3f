"""RegMix: find the best mixture by a regression over many tiny proxies.

Liu et al.: RegMix, ICLR 2025.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.swarm import FitOptions
from megatron_chameleon.ranges import (
    CheckedOptions,
    Count,
    Fits,
    PositiveShare,
    Repetitions,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class TreeOptions(CheckedOptions):
    """Options of the regression (LightGBM), and of the search for its optimum."""

    num_trees: Fits = 1000
    """Number of trees per regression, without early stopping (RegMix: 1000)."""
    tree_learning_rate: PositiveShare = 0.01
    """Learning rate of the trees (RegMix: 0.01)."""
    min_runs_in_leaf: Count | None = None
    """Minimum runs per leaf; default: an eighth of the runs, but at most 20, which is LightGBM's
    default."""
    fit_seed: Seed = 42
    """Seed of the trees, the folds and the mixtures of the search (RegMix: 42)."""
    folds: SeveralRepetitions = 5
    """Folds of the cross-validation."""
    num_draws: Repetitions = 100_000
    """Number of mixtures sampled by the search, around the domains' token shares (RegMix: 100k)."""
    num_best: Repetitions = 128
    """Number of best mixtures to average for the result (RegMix: 128)."""

    def __post_init__(self) -> None:
        """Raise UserError for values out of range, or that exclude each other."""
        super().__post_init__()
        if self.num_best > self.num_draws:
            raise UserError(f"--num-best {self.num_best} exceeds --num-draws {self.num_draws}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegmixOptions(FitOptions):
    """Train many tiny proxies on sampled mixtures, fit their losses, and take the best mixture.

    With --swarm-dir, or --ratios and --metrics, fit existing runs instead.
    """

    num_proxies: Repetitions = 512
    """Proxies to train, each on its own mixture (RegMix: 512; Chameleon's paper: 200)."""
    trees: TreeOptions = dataclasses.field(default_factory=TreeOptions)


def compute(options: RegmixOptions) -> int | None:
    """Train the proxies, fit their losses and write the mixture."""
    from megatron_chameleon.methods.regmix.compute import Regmix

    return None if Regmix(options).compute() else STOPPED_STATUS


METHOD = Method(
    name="regmix",
    options=RegmixOptions,
    compute=compute,
    summary="the mixture with the lowest target loss, predicted by a regression over many tiny "
    "proxies",
    needs="nothing besides the corpus; or results of runs on many mixtures (--ratios, --metrics)",
    cost="hundreds of tiny proxies (--num-proxies), several trained concurrently",
    good_for="a known target and at most a few dozen domains; reuse of existing runs",
    source="Liu et al.: RegMix, ICLR 2025",
)
