"""Whether, and how, a run's mixture follows the model that is trained."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.options.ranges import BelowOne, Count


@dataclasses.dataclass(frozen=True)
class OnlineOptions:
    """Chameleon's weights, computed anew during training from the model's own embeddings."""

    online_interval: Count | None = None
    """Steps between two recomputations of the mixture, the run's own until the first. The mixture
    stays as it is unless given. Needs --permutation epoch or feistel."""
    online_windows: Count = 256
    """Windows of the training text per domain, at most, each of up to --seq-length tokens; the same
    ones every time."""
    online_layer: int | None = None
    """Hidden states after this many layers are averaged, before the final norm; the middle unless
    given."""
    online_recipe: Literal["reference", "paper", "scaled"] = "reference"
    """From embeddings to weights, as --recipe of tools/compute_mixture.py."""
    online_smoothing: BelowOne = 0.5
    """Share of the weights in use that stays at each recomputation; 0 keeps nothing of them
    (assumed: the paper leaves weights that change to later work)."""
