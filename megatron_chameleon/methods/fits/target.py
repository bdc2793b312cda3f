"""What a fit's mixture is to make small: ``--target`` as shares of the losses that are fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_chameleon.artifacts.run_columns import matched
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.mixture.checks import Array


def target_shares(given: str | None, metrics: Sequence[str]) -> Array:
    """The share [m] of each of ``metrics`` in the target, summing to 1; alike without a target.

    Raises:
        UserError: for a name that is none of them or is there twice, or a share that is not a
            number above 0.
    """
    if given is None:
        return np.full(len(metrics), 1.0 / len(metrics))
    shares = np.zeros(len(metrics))
    for part in filter(None, map(str.strip, given.split(","))):
        asked, share = _name_and_share(part, given, metrics)
        name = matched([asked], metrics).get(asked)
        if name is None:
            raise UserError(
                f"--target {given}: no loss is called '{asked}'; there are {listed(list(metrics))}"
            )
        if shares[metrics.index(name)]:
            raise UserError(f"--target {given}: '{name}' is there twice; name it once")
        shares[metrics.index(name)] = share
    if not shares.any():
        raise UserError(f"--target {given}: it names nothing; there are {listed(list(metrics))}")
    return shares / shares.sum()


def check_target(given: str | None, domains: Sequence[str]) -> None:
    """Raises UserError for a target that is none of ``domains``, before proxies are trained."""
    target_shares(given, domains)


def _name_and_share(part: str, given: str, metrics: Sequence[str]) -> tuple[str, float]:
    """``a`` or ``a=2``; a name may have an = in it."""
    if part in metrics or "=" not in part:
        return part, 1.0
    name, _, number = part.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise UserError(
            f"--target {given}: the share '{number.strip()}' of '{name.strip()}' is not a finite "
            "number above 0"
        )
    return name.strip(), share
