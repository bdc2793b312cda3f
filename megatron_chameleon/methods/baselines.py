"""Training-free baselines: uniform, natural proportions, and UniMax.

UniMax (Chung et al., ICLR 2023) divides the token budget evenly over the domains. Tokens beyond a
domain's epoch limit are redistributed evenly over the other domains. The result is the mixture
within the limits that is nearest to uniform: each weight is min(cap, s/k), with one scale s for all
domains. :class:`~megatron_chameleon.methods.limits.EpochLimit` computes it. If all domains at their
limits provide fewer tokens than the budget, the method raises UserError, whereas the paper reduces
the budget.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import ChosenDomainsOptions
from megatron_chameleon.ranges import LargeCount, Positive

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.methods.training_free import AssignedWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformOptions(ChosenDomainsOptions):
    """Give every domain the same weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalOptions(ChosenDomainsOptions):
    """Give every domain a weight that depends on its number of training tokens."""

    temperature: Positive = 1.0
    """Temperature T: weights are proportional to tokens^(1/T). T = 1 gives the natural proportions;
    a larger T gives more uniform weights. If a paper states an exponent, such as 0.3 for XLM-R,
    pass its inverse."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnimaxOptions(ChosenDomainsOptions):
    """Divide the tokens evenly, within a limit on the epochs of each domain."""

    # The base class has a default; field() removes the default, so the option is required.
    token_budget: LargeCount = dataclasses.field()
    """Token budget of the target run; the epochs of each domain are computed from it."""
    max_epochs: Positive = 4.0
    """Maximum epochs of each domain's training tokens. Up to 4 epochs, repeated data are almost as
    useful as new data (Muennighoff et al. 2023)."""


def compute_equal(options: UniformOptions | UnimaxOptions) -> None:
    """Write a mixture with weight 1/k for each of k domains, subject to the epoch limit."""
    import numpy as np

    from megatron_chameleon.methods.training_free import AssignedWeights, run_training_free

    name, heading = "uniform", "Uniform: equal weights"
    if isinstance(options, UnimaxOptions):
        limit = f"--max-epochs {options.max_epochs:g} and --token-budget {options.token_budget:,}"
        name, heading = "unimax", f"UniMax: as uniform as possible within {limit}"

    def assign(_corpus: Corpus, names: list[str]) -> AssignedWeights:
        return AssignedWeights(np.full(len(names), 1.0 / len(names)), heading, paper_flops=0.0)

    run_training_free(name, options, assign)


def compute_natural(options: NaturalOptions) -> None:
    """Write weights proportional to n^(1/T), where n is a domain's number of training tokens."""
    from megatron_chameleon.errors import UserError
    from megatron_chameleon.methods.training_free import AssignedWeights, run_training_free
    from megatron_chameleon.mixture.weights import natural_weights

    temperature = options.temperature

    def assign(corpus: Corpus, names: list[str]) -> AssignedWeights:
        tokens = corpus.train_tokens
        try:
            weights = natural_weights([tokens[name] for name in names], temperature)
        except ValueError as error:
            raise UserError(f"--temperature {temperature:g} for {corpus.root}: {error}") from error
        heading = f"Natural: proportional to (training tokens)^(1/{temperature:g})"
        return AssignedWeights(weights, heading, {"temperature": temperature}, paper_flops=0.0)

    run_training_free("natural", options, assign)


METHODS = (
    Method(
        name="uniform",
        options=UniformOptions,
        compute=compute_equal,
        summary="the same weight for every domain",
        needs="nothing besides the corpus",
        cost="nothing",
        good_for="a first run; the baseline for all other mixtures",
        source="",
    ),
    Method(
        name="natural",
        options=NaturalOptions,
        compute=compute_natural,
        summary="each domain's share of the corpus's tokens, with a temperature",
        needs="nothing besides the corpus",
        cost="nothing",
        good_for="corpora whose domain sizes are meaningful; a temperature of about 3 for many "
        "languages",
        source="Conneau et al.: XLM-R, ACL 2020 (for the temperature)",
    ),
    Method(
        name="unimax",
        options=UnimaxOptions,
        compute=compute_equal,
        summary="as uniform as the epoch limit allows",
        needs="the token budget of the target run (--token-budget)",
        cost="nothing",
        good_for="domains of very different sizes, such as many languages",
        source="Chung et al.: UniMax, ICLR 2023",
    ),
)
