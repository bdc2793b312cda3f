"""What Chameleon's paper prints, to be read beside what a run gave."""

from __future__ import annotations

from megatron_chameleon.report.paper.beside import paper_tables
from megatron_chameleon.report.paper.published import published_tables
from megatron_chameleon.report.paper.results import Setting, paper_settings

__all__ = ["Setting", "paper_settings", "paper_tables", "published_tables"]
