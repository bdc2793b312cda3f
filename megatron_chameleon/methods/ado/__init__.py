"""ADO: the mixture follows scaling laws of the domains' training losses.

Jiang et al.: Adaptive Data Optimization, 2024.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.methods.online import Default, OnlineMethod
from megatron_chameleon.ranges import BelowOne, CheckedOptions


@dataclasses.dataclass(frozen=True)
class AdoOptions(CheckedOptions):
    """Flags of ``--online ado``."""

    ado_min_weight: BelowOne | None = None
    """Smallest preference of a domain (default 0.01, as in the paper; at most 1 / (2 k) for k
    domains)."""


ONLINE = OnlineMethod(
    name="ado",
    follows="scaling laws of the domains' training losses",
    hook="megatron_chameleon.methods.ado.hook:AdaptiveDataOptimization",
    options=AdoOptions,
    defaults={
        "online_interval": Default(100),
        "online_smoothing": Default(0.9, "of preferences"),
        "online_warmup_iters": Default(
            None, "a tenth of --train-iters and at most 1000, to which no law is fitted"
        ),
        "ado_min_weight": Default(0.01),
    },
)
