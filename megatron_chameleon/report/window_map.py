"""A map of the windows of every domain in two dimensions, by UMAP or PCA."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from megatron_chameleon.report import figures
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import shortened

# UMAP takes about 7 s for this many, plus some 15 s to import and compile.
MOST_WINDOWS = 2000
# No map is drawn of fewer.
FEWEST_WINDOWS = 3
SEED = 0
# umap-learn's defaults.
NEIGHBOURS, MIN_DIST = 15, 0.1
# For fewer windows UMAP's result is mostly noise.
FEWEST_FOR_UMAP = 200

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class WindowMap:
    """A sample of the windows of an embedding store in two dimensions.

    Attributes:
        points: [n, 2] float32; only distances between them are meaningful.
        domains: [n] index into ``names``, int64.
        names: of the domains, in the order of the store; each has a point.
        summary: caption with the windows shown and the projection.
    """

    points: Array
    domains: NDArray[np.int64]
    names: tuple[str, ...]
    summary: str

    @property
    def centroids(self) -> NDArray[np.float64]:
        """Mean of the points of each domain, [k, 2] float64."""
        return pd.DataFrame(self.points.astype(np.float64)).groupby(self.domains).mean().to_numpy()


def window_map(folder: RunFolder) -> WindowMap | None:
    """Windows of the embedding store with the most domains, in two dimensions.

    UMAP (McInnes et al. 2018) where umap-learn is installed and there are 200 windows, PCA
    otherwise. Equal stores give equal maps on one machine; UMAP's differ between machines.

    Args:
        folder: of the run; None is returned if none of its stores has three windows.

    Raises:
        UserError: if a file of the store is damaged, or its vectors are not finite.
    """
    sizes = {
        name: (len(store.domains), sum(entry.windows for entry in store.domains.values()))
        for name, store in folder.embeddings.items()
    }
    enough = [name for name, (_, windows) in sizes.items() if windows >= FEWEST_WINDOWS]
    if not enough:
        return None
    name = max(enough, key=lambda name: sizes[name])
    store = folder.embeddings[name]
    counts = {domain: entry.windows for domain, entry in store.domains.items() if entry.windows}
    most = max(1, MOST_WINDOWS // len(counts))
    taken = [min(count, most) for count in counts.values()]
    sampled = []
    for number, (domain, count) in enumerate(zip(counts, taken, strict=True)):
        rng = np.random.default_rng([SEED, number])
        rows = np.sort(rng.choice(counts[domain], count, replace=False))
        sampled.append(store.vectors(domain)[rows])
    vectors, how = np.concatenate(sampled), f"UMAP, {NEIGHBOURS} neighbours, seed {SEED}"
    points = umap_points(vectors) if len(vectors) >= FEWEST_FOR_UMAP else None
    if points is None:
        points, shares = pca_points(vectors)
        how = "PCA, {:.0f}% and {:.0f}% of the variance".format(*(100 * share for share in shares))
    shown, available = len(vectors), sum(counts.values())
    windows = f"{shown:,}" if shown == available else f"{shown:,} of {available:,}"
    summary = f"{windows} windows of {name} by {how}; the axes have no meaning"
    domains = np.repeat(np.arange(len(counts), dtype=np.int64), taken)
    return WindowMap(points, domains, tuple(counts), summary)


def pca_points(vectors: Array) -> tuple[Array, tuple[float, float]]:
    """Project ``vectors`` [n, h] on the two directions of largest variance, [n, 2].

    Signs are such that the largest entry of each direction is positive.

    Returns:
        The points, and the share of the variance along each direction.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    kept = directions[:2]
    kept = kept * np.sign(np.take_along_axis(kept, np.abs(kept).argmax(axis=1)[:, None], axis=1))
    shares = sizes[:2] ** 2 / max(float((sizes**2).sum()), np.finfo(np.float64).tiny)
    return (centred @ kept.T).astype(np.float32), (float(shares[0]), float(shares[1]))


def umap_points(vectors: Array) -> Array | None:
    """UMAP embedding [n, 2] of ``vectors`` [n, h]; None if umap-learn is not installed."""
    try:
        from threadpoolctl import threadpool_limits
        from umap import UMAP  # seconds, since it compiles
    except ImportError:
        return None
    # Numba sets OpenMP's number of threads for the whole process, torch included.
    with threadpool_limits(limits=1, user_api="openmp"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isolated points; one thread because of the seed
        found = UMAP(
            n_neighbors=NEIGHBOURS, min_dist=MIN_DIST, random_state=SEED, n_jobs=1
        ).fit_transform(vectors)
    return np.asarray(found, dtype=np.float32)


def windows_picture(folder: RunFolder) -> figures.Picture | None:
    """A point for each window of text; None without embeddings."""
    found = window_map(folder)
    if found is None:
        return None
    caption = (
        f"A point for each window of text, near others with similar embeddings: {found.summary}."
    )
    return figures.Picture("windows", "Map of window embeddings", caption, window_map_figure(found))


def window_map_figure(found: WindowMap) -> Figure:
    """Every window as a point, coloured by domain, with a legend next to the map.

    Of more than ``MOST_NAMED`` domains, that many with distant centroids are named, others grey.
    """
    named = named_domains(found)
    figure = figures.new_figure(9.0, 6.0)
    axes = figure.add_subplot()
    size = float(np.clip(120 / np.sqrt(len(found.points)), 2.6, 6.0))
    others = ~np.isin(found.domains, named)
    handles: list[Artist] = []
    labels = [shortened(found.names[domain], figures.NAME_LIMIT) for domain in named]
    # Without edges, which would hide a small marker; as pixels in a PDF.
    style: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0, "rasterized": True}
    grey: dict[str, Any] = {"color": figures.PROXY_COLOR, "marker": "o"}
    if others.any():
        axes.plot(*found.points[others].T, markersize=0.8 * size, alpha=0.25, **grey, **style)
        size = 6.0  # named domains stand out
    for number, domain in enumerate(named):
        marker = "o^s"[number // len(figures.COLORS)]
        look: dict[str, Any] = {"color": figures.color_of(number), "marker": marker}
        points = found.points[found.domains == domain].T
        axes.plot(*points, markersize=size, alpha=0.65, **look, **style)
        handles.append(Line2D([], [], linestyle="none", ms=6.0, **look))
    if others.any():
        handles.append(Line2D([], [], linestyle="none", ms=4, **grey))
        labels.append(f"{len(found.names) - len(named):,} other domains")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(figures.PROXY_COLOR)
    axes.set_xlabel(shortened(found.summary, 130), fontsize=8.5, parse_math=False)
    figures.plain_legend(figure, handles, labels, loc="outside right upper", fontsize=8.5)
    return figure


def named_domains(found: WindowMap) -> list[int]:
    """Indices of the domains with a colour: all, or the ``MOST_NAMED`` that cover the map best.

    Greedily: first the centroid farthest from the middle, then each time the one farthest from all
    chosen before.
    """
    centres, chosen = found.centroids, list[int]()
    nearest = np.linalg.norm(centres - centres.mean(axis=0), axis=1)
    for _ in range(min(len(centres), figures.MOST_NAMED)):
        chosen.append(int(nearest.argmax()))
        distances = np.linalg.norm(centres - centres[chosen[-1]], axis=1)
        nearest = np.minimum(nearest, distances) if len(chosen) > 1 else distances
        nearest[chosen] = -1.0
    return sorted(chosen)
