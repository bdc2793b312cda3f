"""Surrogate: find the best mixture by a stack of models of a few proxies' losses."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.swarm import FitOptions
from megatron_chameleon.ranges import (
    CheckedOptions,
    NonNegative,
    Repetitions,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class OptimumOptions(CheckedOptions):
    """Options of the fit, and of the search for its optimum."""

    kl: NonNegative = 0.0
    """Penalty on the Kullback-Leibler divergence of the optimum from --prior: the search minimizes
    the predicted target loss plus this factor times the divergence in nats. A large value gives the
    prior, within the other limits."""
    min_weight: str | None = None
    """Smallest weight: one number for every domain, or NAME=WEIGHT,... for some (default: 0)."""
    max_weight: str | None = None
    """Largest weight: one number for every domain, or NAME=WEIGHT,... for some (default: 1)."""
    num_draws: Repetitions = 10_000
    """Number of mixtures sampled around --prior by the search, before the best are improved."""
    splits: SeveralRepetitions = 4
    """Random splits of the runs into halves. The optimum of each half is priced by the models of
    the other half, which corrects the predicted gain for the selection of the optimum."""
    fit_seed: Seed = 0
    """Seed of the fit, the splits, the search and the intervals."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurrogateOptions(FitOptions):
    """Train proxies on sampled mixtures, fit a stack of models, and take the best mixture.

    Trees, exponential laws and Gaussian processes are cross-validated and stacked, loss by loss.
    The gain of the best mixture over Uniform, the natural mixture and --prior is predicted with
    intervals. If the gain over --prior is not certain, --prior is written.

    With --swarm-dir, or --ratios and --metrics, fit existing runs instead.
    """

    num_proxies: Repetitions = 64
    """Proxies to train, each on its own mixture."""
    fallback: PriorOptions = dataclasses.field(
        default_factory=lambda: PriorOptions(prior="natural")
    )
    optimum: OptimumOptions = dataclasses.field(default_factory=OptimumOptions)


def compute(options: SurrogateOptions) -> int | None:
    """Train the proxies, fit their losses and write the mixture."""
    from megatron_chameleon.methods.surrogate.compute import SurrogateFit

    return None if SurrogateFit(options).compute() else STOPPED_STATUS


METHOD = Method(
    name="surrogate",
    options=SurrogateOptions,
    compute=compute,
    summary="the mixture with the lowest target loss, predicted by a stack of several models, with "
    "the interval of its gain",
    needs="nothing besides the corpus; or results of runs on many mixtures (--ratios, --metrics)",
    cost="tens of proxies (--num-proxies), several trained concurrently",
    good_for="few runs; mixtures within floors and caps and near a prior; knowing whether a gain "
    "is certain",
    source="",
)
