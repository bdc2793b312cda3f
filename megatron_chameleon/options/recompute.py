"""What of a model's activations is kept for the backward pass."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.options.ranges import Count


@dataclasses.dataclass(frozen=True)
class RecomputeOptions:
    """Compute activations again in the backward pass instead of keeping them. No number changes."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full: keep only what goes into a layer, at a third more work. selective: keep all but the
    inside of each MLP, at a fifth more (Megatron's --recompute-modules mlp; its core_attn would
    save nothing here, where attention never holds its scores)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of full: every layer in units of --recompute-num-layers (uniform, the default), or only that
    many layers of each pipeline stage (block)."""
    recompute_num_layers: Count | None = None
    """Of full: see --recompute-method; 1 without it."""
