"""How checkpoints are written, and how many are kept."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointingOptions:
    """How checkpoints are written, and how many are kept."""

    async_save: bool = False
    """Go on training while a checkpoint is written, by processes beside the ranks; the last one of
    a run is waited for. Takes host memory for a second copy of the state meanwhile."""
    keep_last_checkpoints: int = 5
    """Checkpoints that are kept; older ones are deleted once a newer one is complete. 0 keeps all.
    With 1, nothing is left to go back to should that one be damaged."""
