"""Natural proportions: a domain's share of the tokens there are, to the power 1/T."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.mixture import ChosenDomainsOptions
from megatron_chameleon.options.ranges import Positive

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.methods.common.model_free import Assigned


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalOptions(ChosenDomainsOptions):
    """Weigh every domain by how many training tokens it has."""

    temperature: Positive = 1.0
    """T: weights are proportional to tokens^(1/T). 1 leaves the proportions as they are, larger
    values move towards uniform. For an exponent, such as the 0.3 of XLM-R, give its inverse."""


def compute(options: NaturalOptions) -> None:
    """Write the weights that the corpus's own sizes give."""
    from megatron_chameleon.methods.common.model_free import write_model_free

    write_model_free(
        METHOD.name, options, lambda corpus, names: assign(corpus, names, options.temperature)
    )


def assign(corpus: Corpus, names: list[str], temperature: float) -> Assigned:
    """The weights of ``names`` by their training tokens.

    Raises:
        UserError: for a temperature that is none, or if there are no tokens.
    """
    from megatron_chameleon.errors import UserError
    from megatron_chameleon.methods.common.model_free import Assigned
    from megatron_chameleon.mixture.natural import natural_weights

    try:
        tokens = corpus.train_tokens
        weights = natural_weights([tokens[name] for name in names], temperature)
    except ValueError as error:
        raise UserError(f"--temperature {temperature:g} for {corpus.root}: {error}") from error
    heading = f"Natural: shares of the training tokens to the power 1/{temperature:g}"
    return Assigned(weights, heading, {"temperature": temperature}, paper_flops=0.0)


METHOD = Method(
    name="natural",
    options=NaturalOptions,
    compute=compute,
    summary="shares of the corpus's own tokens, with a temperature",
    needs="nothing beside the corpus",
    cost="nothing",
    good_for="corpora whose sizes mean something; a temperature of 3 or so for many languages",
    source="Conneau et al.: XLM-R, ACL 2020 (for the temperature)",
)
"""By size alone."""
