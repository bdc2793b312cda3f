"""The picture of a window map: a point per window, a colour and a marker per domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from megatron_chameleon.report.figures import (
    COLORS,
    NAME_LIMIT,
    PROXY_COLOR,
    color_of,
    new_figure,
)
from megatron_chameleon.report.names import shortened
from megatron_chameleon.report.window_map import WindowMap

# The first of each seven domains have circles, and so on.
MARKERS = "o^s"
# Of more domains than these, which colours and markers tell apart, as many are named.
MOST_NAMED = len(COLORS) * len(MARKERS)
# Side of a marker in points, of few windows and of many.
LARGE, SMALL = 6.0, 2.6


def window_map_figure(window_map: WindowMap) -> Figure:
    """Every window as a point, with a legend beside the map.

    Of more than 21 domains, 21 that lie apart from one another are named, and the others grey.
    """
    named = named_domains(window_map)
    figure = new_figure(9.0, 6.0)
    axes = figure.add_subplot()
    size = float(np.clip(120 / np.sqrt(len(window_map.points)), SMALL, LARGE))
    handles, labels = _draw(axes, window_map, named, size)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(PROXY_COLOR)
    axes.set_xlabel(shortened(window_map.told, 130), fontsize=8.5, parse_math=False)
    _legend(figure, handles, labels)
    return figure


def named_domains(window_map: WindowMap) -> list[int]:
    """The domains that are told apart: all, or the ``MOST_NAMED`` that cover the map best.

    Of many, the first is the one whose centroid is farthest from the middle, and each next one the
    one that is farthest from all before it, so that their points overlap least.
    """
    count = len(window_map.names)
    if count <= MOST_NAMED:
        return list(range(count))
    centres = centroids(window_map)
    distances = np.linalg.norm(centres - centres.mean(axis=0), axis=1)
    chosen = [int(distances.argmax())]
    nearest = np.full(count, np.inf)
    while len(chosen) < MOST_NAMED:
        nearest = np.minimum(nearest, np.linalg.norm(centres - centres[chosen[-1]], axis=1))
        chosen.append(int(nearest.argmax()))
    return sorted(chosen)


def centroids(window_map: WindowMap) -> NDArray[np.float64]:
    """Mean of the points of each domain, [k, 2]."""
    count = len(window_map.names)
    windows = np.bincount(window_map.domains, minlength=count)
    sums = [
        np.bincount(window_map.domains, weights=window_map.points[:, axis], minlength=count)
        for axis in (0, 1)
    ]
    return np.stack(sums, axis=1) / windows[:, None]


def _draw(
    axes: Axes, window_map: WindowMap, named: Sequence[int], size: float
) -> tuple[list[Artist], list[str]]:
    """Draw all points; handles and labels of the legend."""
    others = ~np.isin(window_map.domains, named)
    handles: list[Artist] = []
    labels = [shortened(window_map.names[domain], NAME_LIMIT) for domain in named]
    if others.any():
        _points(axes, window_map.points[others], "o", PROXY_COLOR, size * 0.8, alpha=0.25)
        size = LARGE  # the few that are named stand out
    for number, domain in enumerate(named):
        color, marker = color_of(number), MARKERS[number // len(COLORS)]
        points = window_map.points[window_map.domains == domain]
        _points(axes, points, marker, color, size, alpha=0.65)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle="none", ms=LARGE))
    if others.any():
        handles.append(Line2D([], [], color=PROXY_COLOR, marker="o", linestyle="none", ms=4))
        labels.append(f"{len(window_map.names) - len(named):,} other domains")
    return handles, labels


def _points(
    axes: Axes, points: NDArray[np.float32], marker: str, color: str, size: float, alpha: float
) -> None:
    """Without edges, which would be all there is of a small marker; as pixels in a PDF."""
    axes.plot(
        *points.T,
        linestyle="none",
        marker=marker,
        color=color,
        markersize=size,
        markeredgewidth=0,
        alpha=alpha,
        rasterized=True,
    )


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Beside the map, so that it covers no point."""
    plain = [f"{i}" for i in range(len(labels))]  # matplotlib gives some names a meaning
    legend = figure.legend(
        handles, plain, loc="outside right upper", ncols=1, frameon=False, fontsize=8.5
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
