"""Clusters of window vectors: k-means, what is done to vectors before, and how apart clusters lie.

Hidden states share a large mean, and a few of their features vary far more than the others; both
would drown what tells texts apart. So vectors are centred, each feature is divided by its standard
deviation, and what is left is scaled to length 1: squared distances are then 2 - 2 cos.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.cluster.vq import kmeans2, vq
from scipy.spatial.distance import cdist

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.similarity import unit_rows

# scipy's k-means makes as many iterations as it is told; it is asked for a few at a time, until
# they change nothing or there were 200.
_ITERATIONS, _ROUNDS = 10, 20
# Rows whose distances to all others the silhouette takes: 2048 x 2048 float64 is 34 MB.
SILHOUETTE_ROWS = 2048


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """What is done to vectors before they are compared; ``mean`` and ``deviation`` are [h]."""

    mean: Array
    deviation: Array

    def __call__(self, vectors: npt.NDArray[np.floating]) -> Array:
        """``vectors`` [n, h] centred, divided by the deviations and scaled to length 1, float64.

        A vector that is the mean itself stays zero.
        """
        return unit_rows((vectors.astype(np.float64) - self.mean) / self.deviation)


def fit_scaling(vectors: npt.NDArray[np.floating]) -> Scaling:
    """The means and standard deviations of ``vectors`` [n, h]; 1 for a feature that is constant."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    deviation = vectors.std(axis=0, dtype=np.float64)
    negligible = deviation <= 1e-6 * np.maximum(np.abs(mean), np.finfo(np.float64).tiny)
    return Scaling(mean, np.where(negligible, 1.0, deviation))


@dataclasses.dataclass(frozen=True, eq=False)
class Clustering:
    """K centroids.

    Attributes:
        centroids: [k, h] float64.
        labels: [n] int, the nearest centroid of each vector that they were fitted to.
        inertia: sum of the squared distances to it.
    """

    centroids: Array
    labels: npt.NDArray[np.intp]
    inertia: float


def kmeans(
    vectors: Array,
    num_clusters: int,
    seed: int,
    restarts: int,
    on_start: Callable[[], object] = lambda: None,
) -> Clustering:
    """K-means (Lloyd) from k-means++ starts (Arthur and Vassilvitskii, 2007), the best of them.

    A function of its arguments alone. A cluster that comes out empty is begun anew at the vector
    that lies farthest from its centroid.

    Args:
        vectors: [n, h] float64, at least ``num_clusters`` of them distinct.
        num_clusters: k, from 1 on.
        seed: of the starts.
        restarts: starts; of the smallest inertia, the first counts.
        on_start: is called when a start is through.

    Raises:
        ValueError: if there are fewer distinct vectors than clusters.
    """
    if len(vectors) < num_clusters:
        raise ValueError(
            f"num_clusters is {num_clusters}, more than the {len(vectors)} vectors: take fewer"
        )
    best: Clustering | None = None
    for start in range(restarts):
        found = _from_one_start(vectors, num_clusters, seed, start)
        if found is not None and (best is None or found.inertia < best.inertia):
            best = found
        on_start()
    if best is None:
        raise ValueError(
            f"num_clusters is {num_clusters}, but so many clusters are never all taken: the "
            "vectors are too alike; take fewer"
        )
    return best


def nearest_centroids(
    vectors: Array, centroids: Array
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """For each vector [n, h] the nearest of the ``centroids`` [k, h], and how far it is.

    Of two as near as each other, the first counts. Both results are [n].
    """
    labels, distances = vq(vectors, centroids)
    return labels.astype(np.intp), distances


def silhouette(vectors: Array, labels: npt.NDArray[np.integer], seed: int) -> float:
    """Mean silhouette (Rousseeuw, 1987) of a random sample of ``SILHOUETTE_ROWS`` vectors.

    Of a vector: (b - a) / max(a, b), with a the mean distance to the others of its cluster and b
    the least mean distance to those of another one; 0 where it is alone. 1 is as well apart as can
    be, 0 is none. With fewer vectors it is exact; where all of the sample are of one cluster, 0.

    Args:
        vectors: [n, h] float64.
        labels: [n], the cluster of each.
        seed: of the sample.

    Raises:
        ValueError: if there is one cluster alone.
    """
    if len(labels) and (labels == labels[0]).all():
        raise ValueError("labels are all alike, but a silhouette compares clusters: take 2 or more")
    if len(vectors) > SILHOUETTE_ROWS:
        rows = np.random.default_rng(seed).choice(len(vectors), SILHOUETTE_ROWS, replace=False)
        vectors, labels = vectors[np.sort(rows)], labels[np.sort(rows)]
    present, labels = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        return 0.0
    members = np.eye(len(present))[labels]  # [n, k]
    sizes = members.sum(axis=0)
    sums = cdist(vectors, vectors) @ members  # to all of each cluster
    rows = np.arange(len(vectors))
    own = sizes[labels]
    inside = sums[rows, labels] / np.maximum(own - 1, 1)
    means = sums / sizes
    means[rows, labels] = np.inf
    outside = means.min(axis=1)
    larger = np.maximum(inside, outside)
    scores = np.where(larger > 0, (outside - inside) / np.where(larger > 0, larger, 1.0), 0.0)
    return float(np.where(own > 1, scores, 0.0).mean())


def _from_one_start(vectors: Array, num_clusters: int, seed: int, start: int) -> Clustering | None:
    """K-means from the start of this number; None if a cluster stays empty."""
    generator = np.random.default_rng([seed, num_clusters, start])
    best = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty clusters, which are seen to here
        centroids, before = kmeans2(vectors, num_clusters, 1, minit="++", seed=generator)
        for _ in range(_ROUNDS):
            labels, distances = nearest_centroids(vectors, centroids)
            empty = np.flatnonzero(np.bincount(labels, minlength=num_clusters) == 0)
            if empty.size:
                farthest = np.argsort(-distances, kind="stable")
                centroids[empty] = vectors[farthest[: empty.size]]
            else:
                best = Clustering(centroids, labels, float(np.square(distances).sum()))
                if np.array_equal(labels, before):
                    break
            before = labels
            centroids, _ = kmeans2(vectors, centroids, _ITERATIONS, minit="matrix")
    return best
