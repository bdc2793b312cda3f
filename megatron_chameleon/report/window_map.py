"""Windows of every domain as points in a plane, near where their embeddings are near."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingStore
from megatron_chameleon.report.run_folder import RunFolder

# UMAP takes about 7 s for so many, besides some 15 s in which it is imported and compiled.
MOST_WINDOWS = 2000
# A plane through fewer points shows nothing.
FEWEST_WINDOWS = 3
SEED = 0
# umap-learn's defaults.
NEIGHBOURS, MIN_DIST = 15, 0.1
# What UMAP makes of fewer windows is chance more than it is neighbourhood.
FEWEST_FOR_UMAP = 200

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class WindowMap:
    """Windows of an embedding store in two dimensions.

    Attributes:
        points: [n, 2] float32; only distances between them mean something, and axes do not.
        domains: [n] index into ``names``, int64.
        names: of the domains, in the order of the store; each has a point.
        method: "umap" (McInnes et al. 2018) or "pca", the two directions of the largest variance.
        available: windows in the store, of which ``points`` are a sample, as even over the domains
            as they have windows.
        store: which it is, by its path below the run folder.
        seed: of the sample, and of UMAP.
        neighbours: of a window that UMAP keeps near it; None for PCA.
        explained: share of the variance along each direction of PCA; None for UMAP.
    """

    points: Array
    domains: NDArray[np.int64]
    names: tuple[str, ...]
    method: str
    available: int
    store: str
    seed: int
    neighbours: int | None = None
    explained: tuple[float, float] | None = None

    @property
    def told(self) -> str:
        """What is shown and how, in a sentence for a caption."""
        shown = len(self.points)
        windows = f"{shown:,}" if shown == self.available else f"{shown:,} of {self.available:,}"
        if self.explained is not None:
            first, second = (f"{100 * share:.0f}%" for share in self.explained)
            how = f"PCA, {first} and {second} of the variance"
        else:
            how = f"UMAP, {self.neighbours} neighbours, seed {self.seed}"
        return f"{windows} windows of {self.store} by {how}; the axes have no meaning"


def window_map(folder: RunFolder) -> WindowMap | None:
    """The windows of the embedding store that covers most, in two dimensions.

    By UMAP where umap-learn is installed and there are 200 windows, by PCA otherwise. Equal stores
    give equal maps; UMAP's differ from one machine to another.

    Args:
        folder: of the run; None is returned where none of its stores has three windows.

    Raises:
        UserError: if a file of the store is damaged, or its vectors are not finite.
    """
    chosen = _largest(folder)
    if chosen is None:
        return None
    name, store = chosen
    counts = {domain: entry.windows for domain, entry in store.domains.items() if entry.windows}
    vectors, domains = _sample(store, counts)
    make = functools.partial(
        WindowMap,
        domains=domains,
        names=tuple(counts),
        available=sum(counts.values()),
        store=name,
        seed=SEED,
    )
    by_umap = umap_points(vectors) if len(vectors) >= FEWEST_FOR_UMAP else None
    if by_umap is not None:
        return make(points=by_umap, method="umap", neighbours=NEIGHBOURS)
    points, explained = pca_points(vectors)
    return make(points=points, method="pca", explained=explained)


def even_counts(counts: list[int], most: int) -> list[int]:
    """How many of each of ``counts`` to take: alike, but no more than there are, ``most`` in all.

    At least one of each, even where these are more than ``most``.
    """
    low, high = 1, max(counts)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(count, middle) for count in counts) <= most:
            low = middle
        else:
            high = middle - 1
    return [min(count, low) for count in counts]


def pca_points(vectors: Array) -> tuple[Array, tuple[float, float]]:
    """Projections [n, 2] of ``vectors`` [n, h] on the two directions of largest variance.

    The sign of a direction is such that its entry of largest size is positive.

    Returns:
        The points, and the share of the variance along each direction.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    kept = directions[:2]
    largest = np.abs(kept).argmax(axis=1)
    kept = kept * np.sign(kept[np.arange(len(kept)), largest])[:, None]
    points = np.zeros((len(vectors), 2), dtype=np.float32)
    points[:, : len(kept)] = centred @ kept.T
    shares = sizes**2 / max(float((sizes**2).sum()), np.finfo(np.float64).tiny)
    first, second = [*map(float, shares[:2]), 0.0][:2]
    return points, (first, second)


def umap_points(vectors: Array) -> Array | None:
    """UMAP's [n, 2] of ``vectors`` [n, h]; None where umap-learn, an extra, is not installed."""
    try:
        from threadpoolctl import threadpool_limits
        from umap import UMAP  # seconds, since it compiles
    except ImportError:
        return None
    # Its compiler sets OpenMP's number of threads and leaves it so, for torch in this process too.
    with threadpool_limits(limits=1, user_api="openmp"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of isolated points, and of the one thread of a seed
        found = UMAP(
            n_neighbors=NEIGHBOURS, min_dist=MIN_DIST, random_state=SEED, n_jobs=1
        ).fit_transform(vectors)
    return np.asarray(found, dtype=np.float32)


def _largest(folder: RunFolder) -> tuple[str, EmbeddingStore] | None:
    """The store with the most domains, of those the one with the most windows."""
    sizes = {
        name: (len(store.domains), sum(entry.windows for entry in store.domains.values()))
        for name, store in folder.embeddings.items()
    }
    enough = [name for name, (_, windows) in sizes.items() if windows >= FEWEST_WINDOWS]
    if not enough:
        return None
    name = max(enough, key=lambda name: sizes[name])
    return name, folder.embeddings[name]


def _sample(store: EmbeddingStore, counts: dict[str, int]) -> tuple[Array, NDArray[np.int64]]:
    """Vectors [n, h] of a seeded draw without replacement, and their domains [n]."""
    taken = even_counts(list(counts.values()), MOST_WINDOWS)
    drawn = []
    for number, (domain, count) in enumerate(zip(counts, taken, strict=True)):
        rng = np.random.default_rng([SEED, number])
        rows = np.sort(rng.choice(counts[domain], count, replace=False))
        drawn.append(store.vectors(domain)[rows])
    return np.concatenate(drawn), np.repeat(np.arange(len(counts), dtype=np.int64), taken)
