"""What a swarm found: the held-out losses of every member."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.mixture.checks import Array


@dataclasses.dataclass(frozen=True)
class SwarmResult:
    """The held-out losses of every member, over the domains of the corpus.

    Attributes:
        domains: their k names, in the order of the corpus.
        mixtures: [n, k] float64, what each member was trained on.
        steps: after which held-out losses were measured; the last is the last step of training.
        losses: [n, len(steps), k] float64, mean loss per held-out token in nats; NaN for members
            that diverged, and for domains without held-out text.
        diverged: the numbers of the members that diverged, in rising order.
        cost: of all members, training and held-out passes, over all sessions.
    """

    domains: list[str]
    mixtures: Array
    steps: list[int]
    losses: Array
    diverged: list[int]
    cost: Cost
