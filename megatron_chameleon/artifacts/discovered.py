"""Discovered domains: the document clusters behind the domains of a corpus."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import Amount, Count, FolderRecord, Positive, Share

CENTROIDS_NAME = "discovered.safetensors"


@dataclasses.dataclass(frozen=True)
class NearDocument:
    """A training document of the clustered corpus.

    Attributes:
        domain: domain in the clustered corpus.
        document: number in its domain, from 0.
        distance: distance to the centroid.
        text: beginning of the text, escaped.
    """

    domain: str
    document: Count
    distance: Amount
    text: str


@dataclasses.dataclass(frozen=True)
class DiscoveredDomain:
    """One cluster.

    Attributes:
        documents: number of documents in all splits.
        tokens: split -> number of tokens.
        shares: original domain -> its share of the cluster's tokens, in descending order.
        nearest: the training documents nearest to the centroid.
    """

    documents: Count
    tokens: dict[str, Count]
    shares: dict[str, Share]
    nearest: list[NearDocument]


@dataclasses.dataclass(frozen=True)
class DiscoveredDomains(FolderRecord):
    """The content of ``discovered.json``, next to the ``corpus.json`` of the new corpus.

    ``discovered.safetensors`` holds ``centroids`` [k, h], and ``mean`` and ``deviation`` [h] of the
    vectors before scaling, float32.

    Attributes:
        num_clusters: requested or chosen number of clusters, before small clusters were dissolved.
        silhouettes: number of clusters -> mean silhouette of the windows, for each number of
            clusters that was tried.
        inertia: sum of squared distances of the fitted windows to their centroids.
        fitted_windows: number of windows that the clusters were fitted to.
        model_hash: hash of the proxy's weights.
        layer: layer of the hidden states.
        window_length: maximum tokens per window.
        windows_per_document: maximum windows per document.
        seed: random seed of the window sampling and of k-means.
        dissolved: number of clusters that were too small; their documents were reassigned.
        domains: the new domains, in the order of the centroids.
        divided: names of the domains that were clustered.
    """

    KIND = "discovered domains"
    FILE_NAME = "discovered.json"
    MADE_BY = "megatron-chameleon discover_domains writes it"

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
        """Write ``centroids`` [k, h], ``mean`` [h] and ``deviation`` [h] next to the record."""
        arrays = {"centroids": centroids, "mean": mean, "deviation": deviation}
        content = save({key: np.ascontiguousarray(a, np.float32) for key, a in arrays.items()})
        with replacing(self.root / CENTROIDS_NAME) as temporary:
            temporary.write_bytes(content)
