"""DoReMi: raise the weight of domains where a proxy's loss exceeds a reference model's loss.

Xie et al.: DoReMi, NeurIPS 2023.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import ProxyMethodOptions
from megatron_chameleon.methods.sweep import SweptMethod
from megatron_chameleon.ranges import BelowOne, CheckedOptions, Positive, flag_of

if TYPE_CHECKING:
    from megatron_chameleon.mixture.doremi import DoremiRule


@dataclasses.dataclass(frozen=True)
class DoremiRuleOptions(CheckedOptions):
    """DoReMi's update of the weights by excess losses of the proxy over its reference."""

    doremi_variant: Literal["original", "fork"] = "original"
    """'original': the authors' code. 'fork': the DoReMi of DoGE's repository, to which Chameleon's
    repository points. 'fork' clips the mean excess loss of a domain instead of the excess loss of
    each token, takes small steps without smoothing, weights the mean losses of the domains instead
    of token losses, and excludes the initial weights from the mean."""
    doremi_eta: Positive | None = None
    """Step size of the weights (original: 1, fork: 0.1)."""
    doremi_eps: BelowOne | None = None
    """Smoothing: share of the uniform distribution mixed into the weights after each step; above 0,
    no domain drops out (original: 0.001, fork: 0)."""
    excess_floor: float = 0.0
    """Lower clipping bound of the excess loss, in nats per token."""
    excess_ceiling: float | None = None
    """Upper clipping bound of the excess loss, in nats per token, so that a few tokens do not
    dominate; unlimited by default."""

    def resolve(self) -> DoremiRule:
        """Return the rule of the variant, with the user-supplied values.

        Raises:
            UserError: for values that contradict each other.
        """
        from megatron_chameleon.mixture.doremi import VARIANTS

        rule = VARIANTS[self.doremi_variant]
        try:
            return dataclasses.replace(
                rule,
                eta=rule.eta if self.doremi_eta is None else self.doremi_eta,
                eps=rule.eps if self.doremi_eps is None else self.doremi_eps,
                floor=self.excess_floor,
                ceiling=self.excess_ceiling,
            )
        except ValueError as error:
            flags = "--doremi-eta, --doremi-eps, --excess-floor or --excess-ceiling"
            raise UserError(f"{flags}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoremiOptions(ProxyMethodOptions):
    """Train a reference, then a proxy that upweights domains by its excess loss over the reference.

    The mixture is the mean of the weights over the proxy's steps. An interrupted command resumes
    when it is run again.
    """

    reference: Path | None = None
    """Finished run to use as the reference, of any model size, but with the proxy's tokenizer and
    sequence length. By default, a reference is trained with the proxy's options."""
    reference_mixture: str | None = None
    """Mixture to train the reference with: 'uniform' (default), 'natural' for the domains' shares
    of the tokens, or the path of a mixture.json."""
    reference_model: str | None = None
    """Model of the reference, as for --model; default: the proxy's model. The flags of the
    architecture apply to both models."""
    rule: DoremiRuleOptions = dataclasses.field(default_factory=DoremiRuleOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        for field in ("reference_mixture", "reference_model"):
            value = getattr(self, field)
            if self.reference is not None and value is not None:
                raise UserError(
                    f"{flag_of(field)} {value}: --reference {self.reference} is already trained; "
                    "omit one of the two options"
                )


def run(options: DoremiOptions) -> int | None:
    """Train reference and proxy, and write the mixture."""
    from megatron_chameleon.methods.doremi.compute import Doremi

    return None if Doremi.compute(options) else STOPPED_STATUS


SWEEP = SweptMethod(
    name="doremi",
    point="megatron_chameleon.methods.doremi.sweep:doremi_point",
    groups={"doremi": DoremiRuleOptions},
)
METHOD = Method(
    name="doremi",
    options=DoremiOptions,
    compute=run,
    summary="mean weights of a proxy that upweights domains of high excess loss over a reference",
    needs="nothing besides the corpus; a finished run can be the reference (--reference)",
    cost="two training runs, the second with two additional forward passes per batch",
    good_for="a fixed set of domains, with text that a small model can still learn",
    source="Xie et al.: DoReMi, NeurIPS 2023",
)
