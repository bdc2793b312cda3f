"""What was discovered: the clusters that a corpus's domains are, described for a person."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import Amount, Count, FolderRecord, Positive, Share

FILE_NAME = "discovered.json"
CENTROIDS_NAME = "discovered.safetensors"
FORMAT_VERSION = 1
MADE_BY = "tools/discover_domains.py writes it"


@dataclasses.dataclass(frozen=True)
class NearDocument:
    """A training document of the corpus that was divided; ``text`` is how it begins, escaped.

    ``document`` counts from 0; ``distance`` is that to the centroid.
    """

    domain: str
    document: Count
    distance: Amount
    text: str


@dataclasses.dataclass(frozen=True)
class DiscoveredDomain:
    """One cluster.

    Attributes:
        documents: in all splits.
        tokens: by split.
        shares: original domain -> its share of the cluster's tokens, the largest first.
        nearest: the training documents that lie nearest to the centroid.
    """

    documents: Count
    tokens: dict[str, Count]
    shares: dict[str, Share]
    nearest: list[NearDocument]


@dataclasses.dataclass(frozen=True)
class DiscoveredDomains(FolderRecord):
    """What ``discovered.json`` says, beside the ``corpus.json`` of the corpus that was made.

    The centroids, and what was done to vectors before, are in ``discovered.safetensors``:
    ``centroids`` [k, h], ``mean`` and ``deviation`` [h], float32.

    Attributes:
        num_clusters: that were asked for, or chosen.
        silhouettes: number of clusters -> mean silhouette of windows, for each that was tried.
        inertia: of the chosen clusters, over the windows that they were fitted to.
        fitted_windows: how many those were.
        model_hash: of the proxy's weights.
        layer: whose hidden states were taken.
        window_length: tokens in a window, at most.
        windows_per_document: at most.
        seed: of the draw of windows and the starts of k-means.
        dissolved: clusters that were too small, whose documents went to others.
        domains: the domains that were made, in the order of the centroids.
        divided: the domains that they were made of.
    """

    KIND = "discovered domains"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    num_clusters: Positive
    silhouettes: dict[int, float]
    inertia: float
    fitted_windows: Count
    model_hash: str
    layer: int
    window_length: int
    windows_per_document: int
    seed: int
    dissolved: int
    domains: dict[str, DiscoveredDomain]
    divided: list[str]
    provenance: Provenance
    cost: Cost

    def save_centroids(
        self,
        centroids: NDArray[np.floating],
        mean: NDArray[np.floating],
        deviation: NDArray[np.floating],
    ) -> None:
        """Write ``centroids`` [k, h], ``mean`` [h] and ``deviation`` [h] beside the record."""
        arrays = {"centroids": centroids, "mean": mean, "deviation": deviation}
        content = save({key: np.ascontiguousarray(a, np.float32) for key, a in arrays.items()})
        with replacing(self.root / CENTROIDS_NAME) as temporary:
            temporary.write_bytes(content)
