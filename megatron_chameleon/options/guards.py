"""When a step is left out, and when the run gives up."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.ranges import Count, NonNegative, SeveralRepetitions


@dataclasses.dataclass(frozen=True)
class GuardOptions:
    """When a step is skipped: its update is left out, while data and learning rate go on."""

    max_consecutive_skipped_steps: Count = 10
    """Steps skipped in a row that end the run, also where it was stopped and continued in between.
    A loss or a gradient that is not finite skips a step; so does a spike, by --spike-factor."""
    spike_factor: NonNegative = 0.0
    """Standard deviations above the mean of the last --spike-window steps that are a spike, in the
    loss or in the gradient's norm; 0 takes nothing for a spike (OLMo 2 trains with 6)."""
    spike_window: SeveralRepetitions = 128
    """Steps behind the bound of --spike-factor; there is none before half of them are done, since
    the start or since the mixture changed."""
