"""Aioli: the mixture follows validation losses after steps with perturbed mixtures.

Chen et al.: Aioli, 2024.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.methods.online import Default, OnlineMethod
from megatron_chameleon.ranges import CheckedOptions, Count, Positive, PositiveShare


@dataclasses.dataclass(frozen=True)
class AioliOptions(CheckedOptions):
    """Flags of ``--online aioli``."""

    aioli_steps: Count | None = None
    """Training steps with each perturbed mixture, between two measurements of the validation losses
    (aioli, default 10: the authors' value for seven domains)."""
    aioli_sweeps: Count | None = None
    """Perturbed mixtures per domain between two updates of the mixture; more of them average out
    noise of the losses (aioli, default 2: the authors' value for seven domains)."""
    aioli_emphasis: PositiveShare | None = None
    """Weight of the emphasized domain in a perturbed mixture; the other domains share the rest
    (aioli, default 0.75: the authors' value for seven domains)."""
    aioli_eta: Positive | None = None
    """Step size of the mixture's update: no weight exceeds its initial value by more than a factor
    of e^eta (aioli, default 1: the authors' value for seven domains)."""


ONLINE = OnlineMethod(
    name="aioli",
    follows="validation losses after steps with perturbed mixtures",
    hook="megatron_chameleon.methods.aioli.hook:Aioli",
    options=AioliOptions,
    defaults={
        "online_interval": Default(None, "twice the steps with perturbed mixtures"),
        "online_smoothing": Default(0.1, "of estimated effects"),
        "online_windows": Default(
            64,
            "of the valid split, on which losses are computed before and after each perturbed "
            "mixture, of up to --seq-length tokens",
        ),
        "aioli_steps": Default(10),
        "aioli_sweeps": Default(2),
        "aioli_emphasis": Default(0.75),
        "aioli_eta": Default(1.0),
    },
    has_target=True,
)
