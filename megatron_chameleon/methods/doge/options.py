"""Options of DoGE."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.options import ProxyMethodOptions
from megatron_chameleon.ranges import BelowOne, CheckedOptions, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class DogeRule(CheckedOptions):
    """DoGE's update of the weights by the alignment of gradients."""

    doge_mu: Positive | None = None
    """Strength of the regularization towards the last weights: smaller values allow larger steps
    (default as in the paper: 0.01, or 0.05 with a --target that is not trained on)."""
    doge_eps: BelowOne = 0.0
    """Smoothing: share of the uniform distribution mixed into the weights after each step; above 0,
    no domain drops out (paper: 0)."""
    doge_dw_min: float = 0.0
    """Lower clipping bound of a domain's alignment, before the learning rate (the authors' code: 0,
    so that an opposing gradient counts like an orthogonal one)."""
    doge_dw_max: float = 5.0
    """Upper clipping bound of the alignment (the authors' code: 5)."""
    doge_max_norm: NonNegative = 5.0
    """Clip each domain's gradient to this norm; 0 disables clipping (the authors' code: 5)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DogeOptions(ProxyMethodOptions):
    """Train a proxy that upweights domains by the alignment of their gradients with the target's.

    The mixture is the mean of the weights over the proxy's steps. An interrupted command resumes
    when it is run again.
    """

    target: str | None = None
    """Target domains of the corpus, a,b: they are sampled like the others, but not trained on, and
    get no weight. By default all domains are the target, and all are trained on."""
    train_on_target: bool = False
    """Train on the domains of --target, too, and weigh them."""
    rule: DogeRule = dataclasses.field(default_factory=DogeRule)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        if self.train_on_target and self.target is None:
            raise UserError("--train-on-target requires --target; leave it out, or add --target")
