"""Options of discover_domains. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import EmbeddingOptions
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.ranges import CheckedOptions, Count, Repetitions, Seed, SeveralRepetitions


@dataclasses.dataclass(frozen=True)
class DocumentEmbeddingOptions(EmbeddingOptions):
    """Sampling and embedding of the documents' windows."""

    windows_per_document: Count = 4
    """Maximum number of windows per document, evenly spaced. The mean of their embeddings
    determines the document's cluster."""
    fit_windows: SeveralRepetitions = 20_000
    """Windows sampled from the training text to fit k-means."""


@dataclasses.dataclass(frozen=True)
class DiscoverOptions(CheckedOptions):
    """Cluster a corpus's documents by a proxy's embeddings, and write one domain per cluster.

    The same command resumes an interrupted run.

    Raises:
        UserError: for a number of clusters below 2, or another option out of range.
    """

    corpus: Path
    """Folder written by preprocess_data; all of its text may be in a single domain."""
    checkpoint: Path
    """Proxy model: a run folder (its latest checkpoint), a checkpoint folder (also of Megatron-LM),
    a Hugging Face folder, or a model OWNER/NAME on the Hugging Face hub."""
    discover: str
    """Number of clusters, 2 or more. From a list such as 4,8,16, the number with the best
    silhouette is chosen."""
    output: Path
    """The corpus folder to write. Documents keep their split (train, valid or test)."""
    domains: str | None = None
    """Cluster only these domains, such as a,b,c; all other domains are unchanged. Default: all
    domains."""
    cluster_name: str = "cluster"
    """Prefix of the new domains' names. They are called NAME-00, NAME-01, ..., by decreasing number
    of tokens."""
    store: Path | None = None
    """Folder of embeddings to reuse and extend; default: OUTPUT.embeddings. The folder is kept, so
    that another number of clusters can be tried without embedding again."""
    seed: Seed = 0
    """Random seed of the sampled windows and of k-means."""
    restarts: Repetitions = 10
    """Number of k-means runs from different starts; the run with the smallest inertia is kept."""
    min_tokens_per_split: int = 1
    """Clusters with fewer tokens than this in train, valid or test are dissolved: their documents
    go to the nearest other cluster."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a Hugging Face model. Code that you have not read can do
    anything that you can."""
    embedding: DocumentEmbeddingOptions = dataclasses.field(
        default_factory=DocumentEmbeddingOptions
    )
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.numbers[0] < 2:
            raise UserError(f"--discover {self.discover}: must be >= 2 clusters")
        if self.numbers[-1] > self.embedding.fit_windows:
            raise UserError(
                f"--fit-windows {self.embedding.fit_windows}: fewer than the {self.numbers[-1]} "
                "clusters of --discover; raise --fit-windows"
            )

    @property
    def store_folder(self) -> Path:
        """``--store``, or its default."""
        return self.store or self.output.with_name(f"{self.output.name}.embeddings")

    @property
    def numbers(self) -> list[int]:
        """The numbers of clusters to try, distinct and increasing.

        Raises:
            UserError: unless they are integers.
        """
        try:
            return sorted({int(part) for part in self.discover.split(",")})
        except ValueError:
            raise UserError(
                f"--discover {self.discover}: pass a number of clusters, or a list such as 4,8,16"
            ) from None
