"""A name with its share of a target, as ``--target`` takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_chameleon.errors import UserError


def name_and_share(part: str, given: str, names: Sequence[str]) -> tuple[str, float]:
    """``a`` or ``a=2``: the name, and its share or 1.

    Args:
        part: one of the parts of ``given`` between commas.
        given: all of ``--target``.
        names: that are known, some of which may have an = in them.

    Raises:
        UserError: for a share that is not a finite number above 0.
    """
    if part in names or "=" not in part:
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
