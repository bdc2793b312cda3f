"""DoGE: raise the weight of domains whose gradients align with the target's.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import ProxyMethodOptions
from megatron_chameleon.methods.sweep import SweptMethod
from megatron_chameleon.ranges import BelowOne, CheckedOptions, NonNegative, Positive

if TYPE_CHECKING:
    from megatron_chameleon.mixture.doge import DogeRule

# The authors' values of mu: for held-out text of all domains or a target that is trained on, and
# for other targets.
MU, MU_OUT_OF_DOMAIN = 0.01, 0.05
HELD_OUT: Literal["held-out"] = "held-out"
PAPER: Literal["paper"] = "paper"


@dataclasses.dataclass(frozen=True)
class DogeRuleOptions(CheckedOptions):
    """DoGE's update of the weights by the alignment of gradients."""

    doge_mu: Positive | None = None
    """Strength of the regularization towards the previous weights: smaller values allow larger
    steps (default as in the authors' code: 0.01; 0.05 with a --target that is not trained on)."""
    doge_eps: BelowOne = 0.0
    """Smoothing: share of the uniform distribution mixed into the weights after each step; above 0,
    no domain drops out (paper: 0)."""
    doge_dw_min: float = 0.0
    """Lower clipping bound of a domain's alignment, applied before the alignment is multiplied by
    the learning rate. With 0, as in the authors' code, an opposing gradient has the same effect as
    an orthogonal gradient."""
    doge_dw_max: float = 5.0
    """Upper clipping bound of the alignment (the authors' code: 5)."""
    doge_max_norm: NonNegative = 5.0
    """Clip each domain's gradient to this norm; 0 disables clipping (the authors' code: 5)."""

    def resolve(self, mu: float = MU) -> DogeRule:
        """Return the rule with these values; ``mu`` is the default of ``--doge-mu``.

        Raises:
            UserError: for values that contradict each other.
        """
        from megatron_chameleon.mixture.doge import DogeRule

        values = {name.removeprefix("doge_"): value for name, value in vars(self).items()}
        if self.doge_mu is None:
            values["mu"] = mu
        try:
            return DogeRule(**values)
        except ValueError as error:
            argument, _, problem = str(error).partition(" ")
            raise UserError(f"--doge-{argument.replace('_', '-')} {problem}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class DogeOptions(ProxyMethodOptions):
    """Train a proxy that upweights domains whose gradients align with the target's gradient.

    The mixture is the mean of the weights over the proxy's steps. An interrupted command resumes
    when it is run again.
    """

    algorithm: Literal["held-out", "paper"] | None = None
    """Gradient with which the domains' gradients are aligned. 'held-out' (the default without
    --target) is the authors' configuration for all domains: the gradient of the mean loss of
    held-out text, in equal parts of each domain. 'paper' (always with --target, unless it names
    held-out domains) is Algorithm 1: the sum of the target domains' gradients on the training
    batch."""
    target: str | None = None
    """Domains, also held-out ones, such as a,b or a=2,b=1 with their shares; or text that is not in
    the corpus, as NAME=PATH or NAME=PATH=SHARE in the format of preprocess_data --input. Domains of
    the target are not trained on and get no weight. The target is the sum of their gradients on the
    training batch. With held-out domains or texts in it, it is the gradient of the texts and of the
    valid text of all of its domains. By default all domains are the target, and all are trained
    on."""
    target_text_key: str = "text"
    """Key, or column, of the text in the files of --target."""
    train_on_target: bool = False
    """Also train on the domains of --target, and give them weights."""
    rule: DogeRuleOptions = dataclasses.field(default_factory=DogeRuleOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        if self.target is None:
            self.reject_changed(["target_text_key"], "has no effect without --target")
        if self.train_on_target and self.target is None:
            raise UserError("--train-on-target requires --target; leave it out, or add --target")
        if self.algorithm == HELD_OUT and self.target is not None:
            raise UserError(
                f"--algorithm {HELD_OUT}: its target is all domains; leave out --target "
                f"{self.target}, or --algorithm {HELD_OUT}"
            )

    @property
    def uses_held_out(self) -> bool:
        """Whether the target is held-out text of all domains."""
        return self.algorithm != PAPER and self.target is None


def run(options: DogeOptions) -> int | None:
    """Train the proxy and write the mixture."""
    from megatron_chameleon.methods.doge.compute import Doge

    return None if Doge.compute(options) else STOPPED_STATUS


SWEEP = SweptMethod(
    name="doge",
    point="megatron_chameleon.methods.doge.sweep:doge_point",
    groups={"doge": DogeRuleOptions},
)
METHOD = Method(
    name="doge",
    options=DogeOptions,
    compute=run,
    summary="a proxy's mean weights; it upweights domains whose gradients align with the target's",
    needs="a corpus with a valid split",
    cost="one training run, whose steps take 1.7 times as long for 7 domains and 2.5 times for 17 "
    "(measured in Chameleon's paper); memory for one gradient per domain",
    good_for="a fixed set of domains; a target domain that is not trained on (--target)",
    source="Fan, Pagliardini, Jaggi: DoGE, ICML 2024",
)
