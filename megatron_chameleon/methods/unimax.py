"""UniMax: as uniform as a limit on repeats allows.

Chung et al.: UniMax, ICLR 2023: the budget is dealt out evenly, and what a domain cannot take
within its epochs goes evenly to the others. That is the mixture min(cap, s/k) nearest to uniform,
which :class:`~megatron_chameleon.methods.common.epoch_limit.EpochLimit` finds. A budget beyond the
epochs of all domains is refused, where the paper takes as much as there is.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.mixture import ChosenDomainsOptions
from megatron_chameleon.options.ranges import LargeCount, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnimaxOptions(ChosenDomainsOptions):
    """Divide the tokens evenly, but go through no domain more often than is allowed."""

    token_budget: LargeCount = dataclasses.field()  # without the default that it would inherit
    """Tokens of the training to come: epochs are counted within it."""
    max_epochs: Positive = 4.0
    """Go through no domain's training tokens more often. Up to 4 times, repeats cost little
    (Muennighoff et al. 2023)."""


def compute(options: UnimaxOptions) -> None:
    """Write the uniform weights within the limit of epochs."""
    import numpy as np

    from megatron_chameleon.methods.common.model_free import Assigned, write_model_free

    heading = (
        f"UniMax: as uniform as --max-epochs {options.max_epochs:g} allows in "
        f"{options.token_budget:,} tokens"
    )
    write_model_free(
        METHOD.name,
        options,
        lambda corpus, names: Assigned(
            np.full(len(names), 1.0 / len(names)), heading, paper_flops=0.0
        ),
    )


METHOD = Method(
    name="unimax",
    options=UnimaxOptions,
    compute=compute,
    summary="as uniform as a limit on repeats allows",
    needs="the training to come in tokens (--token-budget)",
    cost="nothing",
    good_for="domains of very different sizes, small ones among them: many languages",
    source="Chung et al.: UniMax, ICLR 2023",
)
"""Uniform that knows how much text there is."""
