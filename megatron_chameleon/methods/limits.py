"""Prior and bounds of weights: ``--prior``, ``--min-weight`` and ``--max-weight``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import matched
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.optimum import check_bounds
from megatron_chameleon.mixture.weights import natural_weights


def prior_weights(
    name: str, sizes: Mapping[str, float], where: str, held_out: Collection[str] = ()
) -> Array:
    """Return the weights [k] of ``--prior``.

    Args:
        name: "natural", "uniform", or the path of a mixture.json.
        sizes: domain -> its size, in tokens or bytes; "natural" is proportional to it.
        where: location of the domains, for messages.
        held_out: domains that are never trained on, for messages.

    Raises:
        UserError: if no domain has text, or the mixture cannot be read or has other domains.
    """
    if name == "natural":
        try:
            return natural_weights(list(sizes.values()))
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
