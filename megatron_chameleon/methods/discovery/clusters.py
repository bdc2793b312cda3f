"""From the vectors of windows and documents to one cluster a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Split
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.embedding.documents import DocumentBlock
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.discovery.plan import DiscoverPlan
from megatron_chameleon.methods.discovery.vectors import all_blocks, fit_vectors
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.clustering import (
    Clustering,
    Scaling,
    fit_scaling,
    kmeans,
    nearest_centroids,
    silhouette,
)
from megatron_chameleon.progress import progress_bar

NEAREST_SHOWN = 3
# Seconds; what is over sooner shows no progress.
_DELAY = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """The number of clusters that was chosen, and its centroids."""

    scaling: Scaling
    centroids: Array
    """[k, h], as scaled."""
    inertia: float
    silhouettes: dict[int, float]
    """Number of clusters -> mean silhouette, for each that was tried."""
    windows: int


@dataclasses.dataclass(frozen=True, eq=False)
class Clusters:
    """Which document is in which cluster, the largest first."""

    fitted: Fitted
    labels: dict[tuple[str, Split], NDArray[np.int32]]
    """Domain and split -> [num_documents]."""
    centroids: Array
    """[k, h], as scaled, of the clusters that are left."""
    tokens: NDArray[np.int64]
    """[k, domains, splits] of the documents of each cluster."""
    documents: NDArray[np.int64]
    """[k]"""
    dissolved: int
    """Clusters that were too small."""


@dataclasses.dataclass(frozen=True)
class Near:
    """A training document and how far it lies from its centroid."""

    distance: float
    domain: str
    document: int


def fit_clusters(plan: DiscoverPlan) -> Fitted:
    """K-means on the windows, for the number of clusters that has the best silhouette.

    Raises:
        UserError: if the windows are too few or too alike for so many clusters.
    """
    vectors = fit_vectors(plan)
    scaling = fit_scaling(vectors)
    scaled = scaling(vectors)
    tried: dict[int, tuple[float, Clustering]] = {}
    starts = len(plan.numbers) * plan.options.restarts
    with progress_bar(starts, " starts", "fitting", delay=_DELAY) as bar:
        for number in plan.numbers:
            found = _fitted_to(plan, scaled, number, bar.update)
            tried[number] = silhouette(scaled, found.labels, plan.options.seed), found
    best = max(tried, key=lambda number: tried[number][0])  # the smallest of equal ones
    silhouettes = {number: score for number, (score, _) in tried.items()}
    chosen = tried[best][1]
    return Fitted(scaling, chosen.centroids, chosen.inertia, silhouettes, len(scaled))


def _fitted_to(
    plan: DiscoverPlan, scaled: Array, number: int, on_start: Callable[[], object]
) -> Clustering:
    try:
        return kmeans(scaled, number, plan.options.seed, plan.options.restarts, on_start)
    except ValueError as error:
        raise UserError(
            f"--discover {number}, fitted to {len(scaled)} windows: {error}, or give more "
            "--fit-windows"
        ) from error


def assign_documents(plan: DiscoverPlan, fitted: Fitted) -> Clusters:
    """Every document goes to the nearest centroid; clusters that are too small are dissolved.

    A document's vector is the mean over its windows, so that the centroid nearest to it is the one
    of the least sum of squared distances to them (but for the scaling to length 1).

    Raises:
        UserError: if fewer than two clusters have enough text in every split.
    """
    labels = {
        (name, split): np.empty(plan.corpus.domains[name].split(split).documents, np.int32)
        for name in plan.names
        for split in SPLITS
    }
    documents = sum(map(len, labels.values()))
    with progress_bar(documents, " documents", "assigning", delay=_DELAY) as bar:
        for block in all_blocks(plan):
            scaled = fitted.scaling(plan.vectors.read(block))
            _labels_of(labels, block)[:], _ = nearest_centroids(scaled, fitted.centroids)
            bar.update(len(scaled))
    left = np.arange(len(fitted.centroids))
    least = plan.options.min_tokens_per_split
    while (smallest := _too_small(plan, labels, left, least)) is not None:
        left = left[left != smallest]
        if len(left) < 2:
            raise UserError(
                f"--discover {plan.options.discover}: fewer than two clusters have {least} tokens "
                "in each of train, valid and test; give fewer clusters, or a corpus with more text"
            )
        _dissolve(plan, fitted, labels, smallest, left)
    return _in_order(plan, fitted, labels, left)


def nearest_documents(plan: DiscoverPlan, clusters: Clusters) -> list[list[Near]]:
    """For each cluster the training documents that lie nearest to its centroid, nearest first."""
    nearest: list[list[Near]] = [[] for _ in clusters.centroids]
    for block in all_blocks(plan, "train"):
        labels = _labels_of(clusters.labels, block)
        scaled = clusters.fitted.scaling(plan.vectors.read(block))
        distances = np.linalg.norm(scaled - clusters.centroids[labels], axis=1)
        for number in np.unique(labels).tolist():
            rows = np.flatnonzero(labels == number)
            rows = rows[np.argsort(distances[rows], kind="stable")[:NEAREST_SHOWN]]
            found = [Near(float(distances[i]), block.domain, block.first + int(i)) for i in rows]
            both = sorted(nearest[number] + found, key=lambda near: near.distance)
            nearest[number] = both[:NEAREST_SHOWN]
    return nearest


def _labels_of(
    labels: dict[tuple[str, Split], NDArray[np.int32]], block: DocumentBlock
) -> NDArray[np.int32]:
    return labels[block.domain, block.split][block.first : block.stop]


def _token_counts(
    plan: DiscoverPlan, labels: dict[tuple[str, Split], NDArray[np.int32]], count: int
) -> NDArray[np.int64]:
    """[count, domains, splits] tokens of the documents of each label."""
    tokens = np.zeros((count, len(plan.names), len(SPLITS)), np.int64)
    for (name, split), here in labels.items():
        lengths = open_tokens(plan.corpus, name, split).lengths
        sums = np.bincount(here, weights=lengths, minlength=count)  # exact below 2^53
        tokens[:, plan.names.index(name), SPLITS.index(split)] = sums
    return tokens


def _too_small(
    plan: DiscoverPlan,
    labels: dict[tuple[str, Split], NDArray[np.int32]],
    left: NDArray[np.intp],
    least: int,
) -> int | None:
    """The smallest of the clusters with fewer than ``least`` tokens in a split, or none in train.

    None if there is no such cluster.

    One at a time: what is dissolved may be enough for another.
    """
    tokens = _token_counts(plan, labels, int(left[-1]) + 1).sum(axis=1)[left]
    is_small = (tokens.min(axis=1) < least) | (tokens[:, SPLITS.index("train")] == 0)
    small = np.flatnonzero(is_small)
    if not small.size:
        return None
    return int(left[small[np.argmin(tokens[small].sum(axis=1))]])


def _dissolve(
    plan: DiscoverPlan,
    fitted: Fitted,
    labels: dict[tuple[str, Split], NDArray[np.int32]],
    cluster: int,
    left: NDArray[np.intp],
) -> None:
    """Move the documents of ``cluster`` to the nearest of those that are ``left``."""
    for block in all_blocks(plan):
        here = _labels_of(labels, block)
        rows = np.flatnonzero(here == cluster)
        if rows.size:
            scaled = fitted.scaling(plan.vectors.read(block)[rows])
            nearest, _ = nearest_centroids(scaled, fitted.centroids[left])
            here[rows] = left[nearest]


def _in_order(
    plan: DiscoverPlan,
    fitted: Fitted,
    labels: dict[tuple[str, Split], NDArray[np.int32]],
    left: NDArray[np.intp],
) -> Clusters:
    """The clusters that are ``left``, that of the most tokens first."""
    count = len(fitted.centroids)
    tokens = _token_counts(plan, labels, count)
    order = left[np.argsort(-tokens[left].sum(axis=(1, 2)), kind="stable")]
    new = np.full(count, -1, np.int32)
    new[order] = np.arange(len(order))
    renamed = {key: new[here] for key, here in labels.items()}
    documents = sum(np.bincount(here, minlength=len(order)) for here in renamed.values())
    return Clusters(
        fitted=fitted,
        labels=renamed,
        centroids=fitted.centroids[order],
        tokens=tokens[order],
        documents=np.asarray(documents, np.int64),
        dissolved=count - len(order),
    )
