"""What there is to export: the domains, their weights and where their tokens lie."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings

from megatron_chameleon.artifacts import SPLITS, Corpus, Mixture, MixtureWarning, Split
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class WeightedDomain:
    """One domain of the corpus.

    Attributes:
        name: as the corpus calls it.
        weight: share of the tokens drawn; all of them sum to 1, and some may be 0.
        tokens: split -> tokens in it.
        prefixes: split -> absolute path of its .bin and .idx files, without the suffix.
    """

    name: str
    weight: float
    tokens: dict[Split, int]
    prefixes: dict[Split, str]


@dataclasses.dataclass(frozen=True)
class Export:
    """What a format is made of.

    Attributes:
        domains: all domains of the corpus, in its order.
        split: whose files are named by formats that name those of one split.
        token_budget: tokens of the training to come, if known.
    """

    domains: tuple[WeightedDomain, ...]
    split: Split = "train"
    token_budget: int | None = None

    def drawn(self) -> list[WeightedDomain]:
        """The domains that have a weight: most readers refuse a weight of 0."""
        return [domain for domain in self.domains if domain.weight > 0]

    def drawn_from(self, split: Split) -> list[WeightedDomain]:
        """The domains that have a weight, and tokens in ``split``.

        Those without tokens in valid or test leave their weight to the others.

        Raises:
            UserError: for a domain that has a weight but no training tokens.
        """
        drawn = self.drawn()
        empty = [domain.name for domain in drawn if domain.tokens[split] == 0]
        if empty and split == "train":
            raise UserError(
                f"the mixture gives '{empty[0]}' a weight, but the corpus has no training tokens "
                "of it; give the domain some text, or no weight"
            )
        if not empty:
            return drawn
        warnings.warn(
            f"no {split} tokens of {', '.join(empty)}: left out of {split}, whose other domains "
            "share the weight",
            MixtureWarning,
            stacklevel=2,
        )
        left = [domain for domain in drawn if domain.tokens[split] > 0]
        total = math.fsum(domain.weight for domain in left)
        return [dataclasses.replace(domain, weight=domain.weight / total) for domain in left]


def weighted_domains(mixture: Mixture, corpus: Corpus) -> tuple[WeightedDomain, ...]:
    """The corpus's domains with their weights.

    Raises:
        UserError: for a weight on a domain that the corpus does not have, or a path that is not
            UTF-8, which no format could hold.
    """
    weights = mixture.weights_for(corpus.names, str(corpus.root))
    return tuple(
        WeightedDomain(
            name,
            weight,
            {split: corpus.domains[name].split(split).tokens for split in SPLITS},
            {split: _absolute_prefix(corpus, name, split) for split in SPLITS},
        )
        for name, weight in zip(corpus.names, weights, strict=True)
    )


def _absolute_prefix(corpus: Corpus, name: str, split: Split) -> str:
    prefix = os.path.abspath(corpus.prefix(name, split))
    try:
        prefix.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"the path {prefix!r} is not UTF-8; rename the folder") from None
    return prefix
