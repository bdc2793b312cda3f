"""Options of tools/make_report.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Tables and pictures of a run folder: weights, held-out perplexity, affinity, loss, cost."""

    run: tyro.conf.Positional[Path]
    """The run folder, with 1-corpus to 6-evaluation below it."""
    baseline: str | None = None
    """Evaluated run to compare with, by name; default: the one trained with uniform weights."""
