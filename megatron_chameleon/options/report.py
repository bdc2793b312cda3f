"""Options of tools/make_report.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Report a run in one HTML page: held-out perplexity, weights, tasks, cost, losses and more.

    Also writes the tables as Markdown and CSV, and the figures as PNG and PDF.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders with 1-corpus to 6-evaluation; several on the same corpus are merged."""
    baseline: str | None = None
    """Evaluated run to compare with, by name; default: the one trained with uniform weights."""
    output: Path | None = None
    """The folder to write to; default: 7-report of the first run folder."""
