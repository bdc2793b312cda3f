"""What a mixture is for: domains and texts with shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from megatron_chameleon.artifacts.record import Share


@dataclasses.dataclass(frozen=True)
class TargetShares:
    """Shares of a target's domains and texts.

    Attributes:
        value: value of ``--target``; None for the average over domains.
        shares: name of a domain or text -> share; sums to 1.
    """

    value: str | None
    shares: dict[str, Share]

    def loss_of(self, losses: Mapping[str, float]) -> float:
        """Sum of share times loss, in the unit of ``losses`` (name -> loss)."""
        return math.fsum(share * losses[name] for name, share in self.shares.items())
