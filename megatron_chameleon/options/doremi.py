"""Options of DoReMi's update rule."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.options.ranges import BelowOne, Positive


@dataclasses.dataclass(frozen=True)
class DoremiRule:
    """How DoReMi turns excess losses, of the proxy over its reference, into weights."""

    doremi_variant: Literal["original", "fork"] = "original"
    """'original': the authors' code. 'fork': what Chameleon's baseline stood on, which clips the
    mean excess loss of a domain in place of each token's, takes small steps, smooths nothing and
    averages without the weights of the beginning."""
    doremi_eta: Positive | None = None
    """Step size of the weights (original: 1, fork: 0.1); smaller ones move less in a step."""
    doremi_eps: BelowOne | None = None
    """Share of the weights that is uniform after each step (original: 0.001, fork: 0), so that no
    domain is lost."""
    excess_floor: float = 0.0
    """The least that an excess loss counts, in nats per token."""
    excess_ceiling: float | None = None
    """The most that an excess loss counts, in nats per token, so that a few tokens do not decide;
    no limit unless given."""
