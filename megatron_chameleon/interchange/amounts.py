"""Mixtures from amounts of text: training tokens, or epochs, of each domain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import LARGEST_INT64, parse_named_numbers


def token_amounts(
    tokens: str | None, epochs: str | None, sizes: Mapping[str, int], where: str
) -> tuple[str, dict[str, float]]:
    """Return the flag with its value, and the training tokens per name that it asks for.

    Args:
        tokens: value of ``--tokens``; None to use ``epochs``.
        epochs: value of ``--epochs``.
        sizes: domain -> its training tokens, for ``epochs``.
        where: where these domains are, for messages.

    Raises:
        UserError: for a value that is not NAME=NUMBER pairs, an unknown domain or one without
            training text (``--epochs``), or less than one token in all.
    """
    if tokens is not None:
        source, amounts = f"--tokens {tokens}", parse_named_numbers("--tokens", tokens)
    else:
        assert epochs is not None
        source = f"--epochs {epochs}"
        amounts = tokens_of_epochs(
            parse_named_numbers("--epochs", epochs, list(sizes)), sizes, where
        )
    check_total(source, amounts)
    return source, amounts


def tokens_of_epochs(
    epochs: Mapping[str, float], sizes: Mapping[str, int], where: str
) -> dict[str, float]:
    """Return domain -> tokens of its epochs.

    Raises:
        UserError: for a domain with epochs whose size is 0 or unknown.
    """
    for name, count in epochs.items():
        if count and not sizes.get(name):
            raise UserError(f"domain '{name}' of {where} has no training tokens to sample")
    return {name: count * sizes.get(name, 0) for name, count in epochs.items()}


def check_total(source: str, amounts: Mapping[str, float]) -> None:
    """Raise UserError unless ``amounts``, of the option or file ``source``, can be sampled."""
    if not 1 <= math.fsum(amounts.values()) <= LARGEST_INT64:
        raise UserError(f"{source}: must be at least 1 and at most 2^63 tokens in all")


def mixture_of(amounts: Mapping[str, float]) -> Mixture:
    """Return the mixture that samples ``amounts``, and their sum as its token budget."""
    total = sum(map(Fraction, amounts.values()))
    weights = {name: float(Fraction(tokens) / total) for name, tokens in amounts.items()}
    return Mixture(weights, token_budget=round(total))


def sampled_tokens(weights: Mapping[str, float], token_budget: int) -> dict[str, int]:
    """Divide ``token_budget`` by ``weights`` into whole tokens, by the largest remainders."""
    total = sum(map(Fraction, weights.values()))  # floats could lose tokens
    targets = {name: Fraction(w) / total * token_budget for name, w in weights.items()}
    counts = {name: math.floor(target) for name, target in targets.items()}
    order = sorted(targets, key=lambda name: counts[name] - targets[name])  # stable
    left = token_budget - sum(counts.values())
    rounded_up = set(order[:left])
    return {name: count + (name in rounded_up) for name, count in counts.items()}
