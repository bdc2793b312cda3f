"""Options of tools/discover_domains.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.ranges import Count, Repetitions, Seed, SeveralRepetitions


@dataclasses.dataclass(frozen=True)
class DocumentEmbeddingOptions:
    """Which windows of the documents are embedded, and how."""

    layer: int | None = None
    """Hidden states after this many layers, before the final norm; the middle unless given."""
    window_length: Count | None = None
    """Tokens per window, at most; the proxy's sequence length unless given."""
    windows_per_document: Count = 4
    """Windows of a document, at most, spread evenly over it; their mean decides its cluster."""
    fit_windows: SeveralRepetitions = 20_000
    """Windows that k-means is fitted to, drawn from all training text that is divided."""
    embedding_batch_size: Count = 32
    """Windows per forward pass and rank."""


@dataclasses.dataclass(frozen=True)
class DiscoverOptions:
    """Cluster a corpus's documents by a proxy's embeddings; write one whose domains are these.

    A run that was killed is gone on with by the same command.
    """

    corpus: Path
    """Folder written by tools/preprocess_data.py; one domain for all text is enough."""
    checkpoint: Path
    """Proxy model: a run folder (its latest checkpoint) or one checkpoint folder."""
    discover: str
    """How many clusters, 2 or more; of several numbers, 4,8,16, the one of the best silhouette."""
    output: Path
    """The corpus folder to write. Splits stay what they were: no text moves between them."""
    domains: str | None = None
    """Divide only these domains, a,b,c; the others stay as they are. All of them unless given."""
    cluster_name: str = "cluster"
    """What the new domains are called: NAME-00 is the one of the most tokens."""
    store: Path | None = None
    """Folder of embeddings to use and fill; OUTPUT.embeddings unless given. It is kept: other
    numbers of clusters take no further embedding."""
    seed: Seed = 0
    """Of the draw of windows and of the starts of k-means."""
    restarts: Repetitions = 10
    """Starts of k-means; the one of the smallest inertia counts."""
    min_tokens_per_split: int = 1
    """A cluster with fewer tokens than this in train, valid or test is dissolved: its documents go
    to the nearest of the others."""
    embedding: DocumentEmbeddingOptions = dataclasses.field(
        default_factory=DocumentEmbeddingOptions
    )
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)
