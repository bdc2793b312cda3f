"""Options of tools/evaluate.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.parallel import ParallelOptions


@dataclasses.dataclass(frozen=True)
class PerplexityOptions:
    """Held-out perplexity per domain, over packed windows as in training."""

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    checkpoint: Path
    """A run folder (its latest checkpoint) or one checkpoint folder."""
    output: Path
    """The JSON file to write."""
    split: Literal["valid", "test"] = "test"
    """The held-out split."""
    window_length: int | None = None
    """Tokens predicted from one window; the model's sequence length unless given."""
    max_tokens: int | None = None
    """Predicted tokens per domain, at most, in windows spread over the split; all unless given."""
    evaluation_batch_size: int = 32
    """Windows per forward pass and rank; does not change the result."""
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)
