"""How often a run looks at text that it is not trained on."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.ranges import Count


@dataclasses.dataclass(frozen=True)
class ValidationOptions:
    """How often, and on how much, the loss is measured on the valid split of every domain."""

    eval_interval: int = 1000
    """Steps between two validations; 0 validates never."""
    eval_iters: Count = 100
    """Global batches that one validation reads, at most; domains have equal parts of them."""
