"""Adjustments of weights that methods share.

``--keep`` keeps the ratios of an earlier mixture, ``--max-epochs`` limits the epochs of each
domain, ``--min-weight`` and ``--max-weight`` limit its weight, and ``--prior`` is the mixture that
is written without a certain gain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture, implied_epochs
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import matched
from megatron_chameleon.methods.options import OutputOptions
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.optimum import check_bounds
from megatron_chameleon.mixture.weights import capped_weights, natural_weights, placed_weights


@dataclasses.dataclass(frozen=True)
class EpochLimit:
    """Limit on the epochs of each domain in a run of ``token_budget`` training tokens.

    Attributes:
        tokens: domain -> training tokens.
        token_budget: tokens of the target run; epochs are not computed without it.
        max_epochs: maximum epochs of each domain; no limit if None.
    """

    tokens: Mapping[str, int]
    token_budget: int | None
    max_epochs: float | None

    def check(self) -> None:
        """Raise UserError if the domains cannot fill the budget within the limit."""
        self.apply(np.full(len(self.tokens), 1.0 / len(self.tokens)))

    @property
    def caps(self) -> Array | None:
        """Maximum weight [num_domains] of each domain; None without a limit."""
        if self.max_epochs is None or self.token_budget is None:
            return None
        tokens = np.array(list(self.tokens.values()), np.float64)
        return tokens * (self.max_epochs / self.token_budget)

    def apply(self, weights: Array, caps: Array | None = None) -> Array:
        """Return the nearest weights within the limit.

        Args:
            weights: [k] float64, in the order of ``tokens``, or of other domains with ``caps``.
            caps: [k] maximum weights; default: those of ``tokens``.

        Raises:
            UserError: if the domains with a weight cannot fill the budget.
        """
        caps = self.caps if caps is None else caps
        try:
            return weights if caps is None else capped_weights(weights, caps)
        except ValueError as error:
            raise UserError(
                f"--max-epochs {self.max_epochs:g}: the weighted domains have too few tokens for "
                f"--token-budget {self.token_budget:,}; raise --max-epochs or lower --token-budget"
            ) from error

    def mixture_fields(self, unconstrained: Array, limited: Array) -> dict[str, Any]:
        """Return the fields of a Mixture for weights, epochs and limit. Warn about capped domains.

        Args:
            unconstrained: [num_domains] float64 weights without the limit.
            limited: [num_domains] float64 weights within the limit.
        """
        names = list(self.tokens)
        weights = by_name(names, limited)
        if self.token_budget is None:
            return {"weights": weights}
        epochs = implied_epochs(self.tokens, weights, self.token_budget)
        fields = {"weights": weights, "token_budget": self.token_budget, "epochs": epochs}
        if self.caps is None:
            return fields
        at_cap = np.isclose(limited, self.caps, rtol=1e-12, atol=0.0)  # of frozen ratios: rounded
        capped = [names[i] for i in np.flatnonzero((unconstrained > 0) & at_cap)]
        if capped:
            warn(
                f"--max-epochs {self.max_epochs:g} with --token-budget {self.token_budget:,} "
                f"lowers the weights of {format_names(capped)}, and raises the other weights"
            )
        before = by_name(names, unconstrained)
        return {**fields, "max_epochs": self.max_epochs, "unconstrained": before, "capped": capped}


def epoch_limit(
    options: OutputOptions, corpus: Corpus, names: Sequence[str], token_budget: int | None = None
) -> EpochLimit:
    """Return the epoch limit that ``options`` set for the domains ``names`` of ``corpus``.

    ``token_budget`` replaces that of ``options``.
    """
    available = corpus.train_tokens
    tokens = {name: available[name] for name in names}
    return EpochLimit(tokens, token_budget or options.token_budget, options.max_epochs)


@dataclasses.dataclass(frozen=True, eq=False)
class KeptRatios:
    """``--keep``: the weights whose ratios the old domains keep.

    Attributes:
        before: [k] weights of the old domains; 0 for new domains.
        is_old: [k] bool.
    """

    before: Array
    is_old: Array

    @classmethod
    def of(cls, kept: Mixture, names: Sequence[str], path: Path) -> KeptRatios:
        """Find the old domains among ``names``; ``path`` is the file of ``kept``, for messages.

        Raises:
            UserError: if the mixture has no weight for any of ``names``.
        """
        before = np.array([kept.weights.get(name, 0.0) for name in names])
        if not before.any():
            raise UserError(
                f"--keep {path}: it has no weight for any of {format_names(names)}; pass a mixture "
                "that contains some of these domains, or omit --keep"
            )
        return cls(before, np.array([name in kept.weights for name in names]))

    def apply(self, weights: Array) -> Array:
        """Return the ``weights`` [k], in which the old domains have the ratios of ``before``."""
        return placed_weights(weights, self.before, self.is_old)


def prior_weights(
    name: str, sizes: Mapping[str, float | None], where: str, held_out: Collection[str] = ()
) -> Array:
    """Return the weights [k] of ``--prior``.

    Args:
        name: "natural", "uniform", or the path of a mixture.json.
        sizes: domain -> its size, in tokens or bytes, or None if unknown; "natural" is proportional
            to it.
        where: location of the domains, for messages.
        held_out: domains that are never trained on, for messages.

    Raises:
        UserError: if a size is unknown, no domain has text, or the mixture cannot be read or has
            other domains.
    """
    if name == "natural":
        known = [size for size in sizes.values() if size is not None]
        if len(known) < len(sizes):
            unknown = next(domain for domain, size in sizes.items() if size is None)
            raise UserError(
                f"--prior natural: {where}: the amount of text in '{unknown}' is unknown; pass "
                "uniform or a mixture of these domains"
            )
        try:
            return natural_weights(known)
        except ValueError as error:
            raise UserError(f"--prior natural: {where}: {error}") from error
    if name == "uniform":
        return np.full(len(sizes), 1.0 / len(sizes))
    try:
        return np.array(Mixture.load(Path(name)).weights_for(list(sizes), where, held_out))
    except UserError as error:
        raise UserError(
            f"--prior {name}: {error}; pass natural, uniform or a mixture of these domains"
        ) from error


def weight_bounds(flag: str, value: str | None, names: Sequence[str], default: float) -> Array:
    """Parse ``--min-weight`` or ``--max-weight``: one number, or NAME=WEIGHT pairs.

    Args:
        flag: name of the option, for messages.
        value: value of the option.
        names: the k domains.
        default: weight of the domains that are not named.

    Returns:
        [k] float64.

    Raises:
        UserError: for an unknown or repeated name, or a weight that is not between 0 and 1.
    """
    bounds = dict.fromkeys(names, default)
    pairs = [item.rpartition("=") for item in map(str.strip, (value or "").split(",")) if item]
    if value is not None and "=" not in value:
        pairs = [(name, "=", value) for name in names]
    named = set[str]()
    for name, _, number in pairs:
        known = matched([name.strip()], names).get(name.strip())
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if known is None or known in named:
            problem = "unknown domain" if known is None else "duplicate domain"
            raise UserError(
                f"{flag} {value}: {problem} '{name}'; pass one number, or NAME=WEIGHT,... with "
                f"names of {format_names(names)}"
            )
        if not 0 <= bound <= 1:
            raise UserError(f"{flag} {value}: '{number}' must be a number from 0 to 1")
        bounds[known] = bound
        named.add(known)
    return np.array(list(bounds.values()))


def bounds_within(
    names: Sequence[str],
    min_weight: str | None,
    max_weight: str | None,
    caps: Sequence[tuple[Array, str]],
) -> tuple[Array, Array]:
    """Return the smallest and largest weights [k] that the options and ``caps`` allow.

    Args:
        names: the k domains.
        min_weight: value of ``--min-weight``.
        max_weight: value of ``--max-weight``.
        caps: further largest weights [k], each with its reason for messages.

    Raises:
        UserError: for an invalid value, or if no mixture lies within the bounds.
    """
    low = weight_bounds("--min-weight", min_weight, names, 0.0)
    high = weight_bounds("--max-weight", max_weight, names, 1.0)
    caps = [(high, "--max-weight"), *caps]
    for cap, reason in caps:
        for name, least, most in zip(names, low, cap, strict=True):
            if least > most:
                raise UserError(
                    f"--min-weight {min_weight}: '{name}' gets at least {least:g}, but at most "
                    f"{most:g} is possible ({reason}); change one of them"
                )
        high = np.minimum(high, cap)
    try:
        check_bounds(low, high)
    except ValueError as error:
        limits = [reason for cap, reason in caps if (cap < 1).any()]
        if min_weight is not None:
            limits.insert(0, "--min-weight")
        raise UserError(
            f"no mixture is within the limits ({', '.join(limits)}): {error}"
        ) from error
    return low, high
