"""Layouts in which domains are discovered, and what is asked for. No torch here."""

from __future__ import annotations

from pathlib import Path

from megatron_chameleon.methods.discovery.options import DiscoverOptions, DocumentEmbeddingOptions
from tests.distributed.layout_cases import DP2, ONE, TP2, Places, reading_layout

DISCOVERING = {"one": ONE, "dp2": DP2, "tp2": TP2}


def discovered(places: Places, name: str) -> Path:
    """The corpus that a layout wrote."""
    return places.root / "discovered" / name


def discover_options(places: Places, name: str) -> DiscoverOptions:
    """Clusters of two of the corpus's domains, by the run 'one'."""
    return DiscoverOptions(
        corpus=places.corpus,
        checkpoint=places.run("one"),
        discover="2,4",
        output=discovered(places, name),
        domains="news,poems",
        restarts=3,
        embedding=DocumentEmbeddingOptions(
            windows_per_document=2, fit_windows=100, embedding_batch_size=16
        ),
        parallel=reading_layout(DISCOVERING[name]),
    )
