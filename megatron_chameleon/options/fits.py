"""Options of the methods that fit losses to mixtures: RegMix and Data Mixing Laws."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.mixture import MethodOptions
from megatron_chameleon.options.ranges import NonNegative, Positive, Repetitions, Seed
from megatron_chameleon.options.swarm import SwarmOptions


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """How the mixtures are drawn that proxies are trained on; as RegMix does unless given."""

    mixture_seed: Seed = 42
    """Of the draw of mixtures."""
    prior_exponent: float = 0.5
    """The draws' mean is the domains' shares of the tokens to this power (RegMix: 0.5; 1 keeps the
    shares, 0 makes all alike)."""
    min_strength: Positive = 0.1
    """Least strength of a draw's Dirichlet distribution: little leaves few domains (RegMix)."""
    max_strength: Positive = 5.0
    """Greatest strength of it (RegMix)."""
    max_upweighting: Positive = 15.0
    """No domain weighs more than this many times its share of the tokens (RegMix: 15)."""
    smallest_weight: NonNegative = 2e-4
    """Smaller weights are 0, and all are multiples of it (RegMix: 2e-4)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(MethodOptions):
    """Of a method that fits what proxies on many mixtures came to."""

    num_proxies: Repetitions
    """Proxies to train, each on a mixture of its own."""
    work_dir: Path | None = None
    """Folder of the proxies; the output without .json unless given."""
    ratios: Path | None = None
    """Fit runs that are there, and train none: a CSV table with a row for each run, its name (run,
    run_id, index or name) and its share of each domain, as of RegMix or Olmix. Needs --metrics."""
    metrics: Path | None = None
    """What those runs came to: a CSV table with the same names and a column for each loss or other
    metric that is to be small."""
    target: str | None = None
    """What is to be small: domains (of --metrics: its columns), a,b or with shares a=2,b=1; the
    mean over all of them unless given."""
    draws: DrawOptions = dataclasses.field(default_factory=DrawOptions)
    swarm: SwarmOptions = dataclasses.field(default_factory=SwarmOptions)
