"""Data Mixing Laws: the mixture that exponential laws of a few proxies' losses predict to be best.

Ye et al.: Data Mixing Laws, ICLR 2025.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.fits import FitOptions
from megatron_chameleon.options.ranges import Count, NonNegative, Positive, Repetitions, Seed, Share


@dataclasses.dataclass(frozen=True)
class LawOptions:
    """The laws, and the search for their optimum."""

    huber_delta: Positive = 0.05
    """Residuals above this, in nats, count linearly (the study: 0.05)."""
    law_ridge: NonNegative = 1e-3
    """Of the laws' exponents, beside the mean Huber loss in units of its delta squared."""
    num_starts: Repetitions = 16
    """Starts of the optimiser for each law."""
    fit_seed: Seed = 0
    """Of the starts."""
    max_extrapolation: Share | None = None
    """No weight leaves the range of the trained mixtures by more than this; the whole simplex is
    searched unless given."""
    target_steps: Count | None = None
    """Predict the losses after so many steps before the laws are fitted, by a power law over the
    losses that were measured on the way (--eval-interval)."""
    fit_steps_from: int | None = None
    """Measurements before this step say nothing of that power law; those of the first third of the
    steps unless given (the study: 10,000 of 30,000)."""
    model_sizes: tuple[str, ...] = ()
    """Train the proxies at each of these sizes, three or more, in place of --model-size."""
    target_size: str | None = None
    """Predict the losses of a model of this size before the laws are fitted, by a power law over
    --model-sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixingLawsOptions(FitOptions):
    """Train proxies on a few mixtures, fit a law to each domain's loss, take the best mixture.

    With --ratios and --metrics, runs that are there are fitted instead.
    """

    num_proxies: Repetitions = 20
    """Proxies to train, each on a mixture of its own (Chameleon's paper: 20)."""
    laws: LawOptions = dataclasses.field(default_factory=LawOptions)


def compute(options: MixingLawsOptions) -> int | None:
    """Train what is to be trained, fit it and write the mixture, unless asked to stop before."""
    from megatron_chameleon.methods.fits.mixing_laws import compute_mixing_laws

    return None if compute_mixing_laws(options) else STOPPED_STATUS


METHOD = Method(
    name="mixing-laws",
    options=MixingLawsOptions,
    compute=compute,
    summary="what laws of the losses over the weights predict to be best for a target",
    needs="nothing beside the corpus; or results of runs on many mixtures (--ratios, --metrics)",
    cost="tens of proxies (--num-proxies), for each of --model-sizes",
    good_for="few domains; predicting larger models and longer runs from small ones",
    source="Ye et al.: Data Mixing Laws, ICLR 2025",
)
