"""Options of DoGE's update rule."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.ranges import BelowOne, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class DogeRule:
    """How DoGE turns the alignment of gradients into weights."""

    doge_mu: Positive | None = None
    """How strongly the weights are held where they are: smaller ones let them move further in a
    step (paper: 0.01, and 0.05 towards a --target that is not trained on, which it is unless
    given)."""
    doge_eps: BelowOne = 0.0
    """Share of the weights that is uniform after each step, so that no domain is lost (paper:
    0)."""
    doge_dw_min: float = 0.0
    """The least that a domain's alignment counts, before the learning rate (the authors' code: 0,
    so that a domain which points away loses as one does that points aside)."""
    doge_dw_max: float = 5.0
    """The most (the authors' code: 5)."""
    doge_max_norm: NonNegative = 5.0
    """Clip each domain's gradient to this norm; 0 clips nothing (the authors' code: 5)."""
