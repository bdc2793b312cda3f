"""When a run leaves before its last step."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.ranges import Positive


@dataclasses.dataclass(frozen=True)
class StoppingOptions:
    """When a run saves and leaves with status 0, to go on later.

    tools/compute_mixture.py, which has no mixture then, leaves with status 75, or 0 under torchrun.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1, sent to any rank, do so at any time.
    """

    exit_duration_in_mins: Positive | None = None
    """Minutes after which it does, counted from the start of this command; never unless given."""
