"""Options of tools/make_report.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """One page of a run: held-out perplexity, weights, tasks, cost, losses and more.

    Beside it lie the tables as Markdown and CSV, and the pictures as PNG and PDF.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run folder, with 1-corpus to 6-evaluation below it; of several on the same corpus, one
    page of all."""
    baseline: str | None = None
    """Evaluated run to compare with, by name; default: the one trained with uniform weights."""
    output: Path | None = None
    """The folder to write to; default: 7-report of the first run folder."""
