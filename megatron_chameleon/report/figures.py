"""Figures of weights, affinity, losses, sweeps and windows of text, as PNG, PDF and SVG.

Figures are built without pyplot's global state. Colours are from Okabe and Ito's palette and a
diverging colour map, which people with colour-vision deficiencies can also distinguish.
"""

from __future__ import annotations

import dataclasses
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.console import display_width
from megatron_chameleon.report.options import Projection
from megatron_chameleon.report.run_folder import (
    BASELINE_METHOD,
    RunFolder,
    distinct_runs,
    run_labels,
)
from megatron_chameleon.report.tables import shortened
from megatron_chameleon.report.weights import SweptAxis, mode_of

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PROXY_COLOR = "#777777"
REFERENCE_COLOR = "#444444"
GRID_COLOR = "#DDDDDD"
LINE_STYLES = ("solid", "dashed", "dotted", "dashdot")
# Colours that the page redefines in dark mode; all others are the same in both modes.
PAGE_COLORS = {
    "#ffffff": "var(--paper)",
    "#000000": "var(--ink)",
    GRID_COLOR.lower(): "var(--grid)",
    PROXY_COLOR.lower(): "var(--proxy)",
    REFERENCE_COLOR.lower(): "var(--reference)",
    **{color.lower(): f"var(--series-{i})" for i, color in enumerate(COLORS[:-1])},
}
# In SVG, more points than this are drawn as one image instead of one element each.
MOST_POINTS = 3000
IMAGE_DPI = 200
# Colours of text on coloured cells, the same in light and dark pages.
DARK_TEXT, LIGHT_TEXT = "#111111", "#FDFDFD"
DPI = 130
# Maximum characters of a name on an axis, in a legend, and in a narrow panel.
NAME_LIMIT, LABEL_LIMIT, NARROW_LIMIT = 26, 40, 19
# Each row of a legend beyond LEGEND_ROWS makes the figure taller by LEGEND_ROW_HEIGHT inches.
LEGEND_ROWS, LEGEND_ROW_HEIGHT = 3, 0.21
# With more domains than these, numbers in cells and names on axes would overlap.
CELLS_WITH_NUMBERS, NAMES_ON_AN_AXIS = 12, 60
# Maximum number of domains with a panel of losses, and with bars.
MOST_PANELS, MOST_BARS = 24, 60
# A running mean leaves about this many independent points of a curve.
SMOOTH_POINTS = 25
# Maximum number of domains of a sweep, or of a map of windows, with a distinct colour and marker.
MOST_NAMED = 3 * len(COLORS)
# Maximum number of windows on a map. UMAP maps this many in 7 s, after 15 s to import and compile.
MOST_WINDOWS = 2000
# A map needs at least this many windows.
FEWEST_WINDOWS = 3
SEED = 0
# The defaults of umap-learn.
NEIGHBOURS, MIN_DIST = 15, 0.1
# With fewer windows, the result of UMAP is mostly noise.
FEWEST_FOR_UMAP = 200

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its file name, title and caption.

    Attributes:
        name: file name without suffix.
        title: title in a few words.
        caption: sentences on how to read the figure.
    """

    name: str
    title: str
    caption: str
    figure: Figure


def png(figure: Figure) -> bytes:
    """Encode the figure as PNG; equal figures give equal bytes."""
    return _saved(figure, format="png", dpi=DPI, metadata={"Software": None})


def pdf(figure: Figure) -> bytes:
    """Encode the figure as PDF; equal figures give equal bytes."""
    return _saved(figure, format="pdf", metadata={"CreationDate": None})


def _saved(figure: Figure, **options: Any) -> bytes:
    """Return the bytes of the saved figure; the first save fixes its layout."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # matplotlib warns of each character that is in none of its fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, **options)
    figure.set_layout_engine("none")
    return stream.getvalue()


def svg_content(figure: Figure, name: str) -> str:
    """Content of the ``<svg>`` element of ``figure``; equal figures give equal text.

    Args:
        figure: figure in the colours of this module. Save it as PNG and PDF first, since this
            function changes its images and points. matplotlib escapes the texts in the figure.
        name: makes the ids unique, so that one page can contain several figures.
    """
    no_metadata: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Interpolation "none" embeds a pixel for each entry, and the page scales it without smoothing.
    # Points remain vector shapes unless there are many, since an image cannot follow the page's
    # colours.
    images = [i for axes in figure.axes for i in axes.images if i.get_interpolation() == "nearest"]
    points = [line for axes in figure.axes for line in axes.lines if line.get_rasterized()]
    are_many = sum(np.size(line.get_xdata()) for line in points) > MOST_POINTS
    for image in images:
        image.set_interpolation("none")
    for line in points:
        line.set_rasterized(are_many)
    # Points of a long curve that would be closer than a pixel are left out.
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify_threshold": 1.0}
    with matplotlib.rc_context(settings):
        text = _saved(figure, format="svg", dpi=IMAGE_DPI, metadata=no_metadata).decode("utf-8")
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Remove <style>, which would apply to the whole page, and the ids of groups, which repeat in
    # every figure and are never referenced.
    text = re.sub(r"<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for color, variable in PAGE_COLORS.items():
        text = text.replace(f": {color}", f": {variable}")
    return text


def charted_mixtures(folder: RunFolder) -> dict[str, Mixture]:
    """Name -> mixture, without uniform mixtures; mixtures for fine-tuning come last."""
    shown = [item for item in folder.mixtures.items() if item[1].method != BASELINE_METHOD]
    return dict(sorted(shown, key=lambda item: mode_of(*item) == "finetune"))


def weights_picture(mixtures: Mapping[str, Mixture]) -> Picture | None:
    """Draw the weights and their intervals as horizontal bars, grouped by domain.

    If there are more than ``MOST_BARS`` domains, those with the largest weights in any mixture are
    shown. The largest weight of the first mixture is on top.

    Args:
        mixtures: label -> mixture; if empty, the result is None.
    """
    if not mixtures:
        return None
    domains = list(dict.fromkeys(name for mixture in mixtures.values() for name in mixture.weights))
    columns = {label: mixture.weights for label, mixture in mixtures.items()}
    table = pd.DataFrame(columns, domains).fillna(0.0)
    largest = table.max(axis=1).sort_values(ascending=False, kind="stable").index[:MOST_BARS]
    table = table[table.index.isin(largest)]
    table = table.sort_values(table.columns[0], ascending=False, kind="stable")
    names, count = list(table.index), len(domains)
    thickness = 0.8 / len(mixtures)
    figure = new_figure(8.0, 1.6 + min(len(names) * max(0.34, 0.19 * len(mixtures)), 22.0))
    axes = figure.add_subplot()
    handles: list[Artist] = []
    for i, mixture in enumerate(mixtures.values()):
        positions = np.arange(len(names)) + (i + 0.5) * thickness - 0.4
        handles.append(
            axes.barh(positions, table.iloc[:, i], thickness * 0.92, color=color_of(i))[0]
        )
        intervals = mixture.intervals or {}
        there = [k for k, name in enumerate(names) if name in intervals]
        if there:
            low, high = np.array([intervals[names[k]] for k in there]).T
            axes.hlines(positions[there], low, high, color="black", linewidth=1.1)
    handles.append(axes.axvline(1 / count, color=REFERENCE_COLOR, linestyle="--", linewidth=1.2))
    axes.set_yticks(range(len(names)), [shortened(n, NAME_LIMIT) for n in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("weight (share of training tokens)")
    tidy(axes, "x")
    legend_above(figure, handles, [*mixtures, f"uniform (1/{count})"])
    caption = "Share of training tokens by each mixture; the dashed line is uniform."
    if any(mixture.intervals for mixture in mixtures.values()):
        caption += " Whiskers are bootstrap intervals."
    if count > MOST_BARS:
        caption += f" Only the {MOST_BARS} of {count} domains with the largest weights are shown."
    return Picture("weights", "Weight of each domain", caption, figure)


def affinity_picture(mixtures: Mapping[str, Mixture]) -> Picture | None:
    """Heat map of the affinity matrix of the first mixture that has one; None if no mixture does.

    The colour scale spans the entries off the diagonal, since the diagonal is often far larger;
    entries beyond the scale have the colour of its end. It spans at least a tenth of the largest
    entry, so that nearly orthogonal domains are nearly white.
    """
    label = next((name for name, m in mixtures.items() if m.affinity is not None), None)
    if label is None:
        return None
    affinity, names = np.array(mixtures[label].affinity), list(mixtures[label].weights)
    count, sizes = len(names), np.abs(affinity)
    largest = float(sizes.max(initial=0.0))
    off_diagonal = float(sizes[~np.eye(count, dtype=bool)].max(initial=0.0))
    span = max(off_diagonal, 0.1 * largest) or 1.0
    side = float(np.clip(2.4 + 0.42 * count, 5.0, 14.0))
    figure = new_figure(side + 1.2, side)
    axes = figure.add_subplot()
    image = axes.imshow(affinity, cmap="RdBu_r", vmin=-span, vmax=span, interpolation="nearest")
    ticks = range(0, count, -(-count // NAMES_ON_AN_AXIS))
    labels = [shortened(names[i], NAME_LIMIT) for i in ticks]
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_yticks(ticks, labels, parse_math=False)
    axes.set_xticks(ticks, labels, parse_math=False, **turned)
    axes.tick_params(length=0, labelsize=10 if count <= 30 else 7)
    axes.spines[:].set_visible(False)
    for lines in (axes.hlines, axes.vlines):
        between = np.arange(1, count) - 0.5
        lines(between, -0.5, count - 0.5, color="white", linewidth=0.8)
    form = ".2f" if 0.1 <= largest < 1000 else ".1e"
    for (row, column), value in np.ndenumerate(affinity) if count <= CELLS_WITH_NUMBERS else ():
        color, text = LIGHT_TEXT if abs(value) > 0.6 * span else DARK_TEXT, format(value, form)
        axes.text(column, row, text, color=color, ha="center", va="center", fontsize=8)
    extend = "both" if largest > span else "neither"
    bar = figure.colorbar(image, ax=axes, extend=extend, shrink=0.8, aspect=28)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)  # one image instead of 256 shapes
    bar.set_label("affinity (inner product of domain embeddings)")
    bar.outline.set_visible(False)
    caption = (
        f"Inner products of the domain embeddings of the {label} mixture: red for two similar "
        "domains, blue for opposite domains, white for unrelated ones."
    )
    return Picture("affinity", "Affinity of the domains", caption, figure)


@dataclasses.dataclass(frozen=True, eq=False)
class RunCurves:
    """Losses of one run in nats per token, as Series over training steps.

    Attributes:
        label: label of the run.
        total: training loss over all domains.
        domains: training loss by domain, at the steps that recorded it.
        validation: held-out loss by domain.
    """

    label: str
    total: pd.Series[float]
    domains: dict[str, pd.Series[float]]
    validation: dict[str, pd.Series[float]]


def run_curves(label: str, run: TrainingRun) -> RunCurves:
    """Read the metrics of ``run``."""
    records = list(run.metrics())
    steps = [float(record["step"]) for record in records]

    def curves(field: str) -> dict[str, pd.Series[float]]:
        frame = pd.DataFrame([record.get(field) or {} for record in records], index=steps)
        found = {str(name): frame[name].dropna().astype(float) for name in frame}
        return {name: curve for name, curve in found.items() if len(curve)}

    total = pd.Series([record.get("loss") for record in records], steps, dtype=float).dropna()
    return RunCurves(label, total, curves("domain_loss"), curves("validation_loss"))


def smoothing_window(curve: pd.Series[float]) -> int:
    """Odd number of points in the running mean; 1 (no smoothing) for a curve of few points."""
    return len(curve) // SMOOTH_POINTS | 1


def smoothed(curve: pd.Series[float]) -> pd.Series[float]:
    """Centred running mean of the losses, without the first and the last half window."""
    return curve.rolling(smoothing_window(curve), center=True).mean().dropna()


def panel_domains(runs: Sequence[RunCurves]) -> pd.Series[float]:
    """Range of each domain's last smoothed loss over the runs, in the order of the metrics.

    The loss is the training loss where it is recorded, and otherwise the held-out loss.
    """
    last = [
        {
            name: smoothed(run.domains.get(name, run.validation.get(name))).iloc[-1]
            for name in dict.fromkeys((*run.domains, *run.validation))
        }
        for run in runs
    ]
    frame = pd.DataFrame(last, dtype=float)
    return (frame.max() - frame.min()).fillna(0.0)


def loss_picture(folder: RunFolder) -> Picture | None:
    """Loss curves of the base runs and the proxies; None if no run has metrics."""
    names = distinct_runs(folder, folder.base_runs)
    labels = run_labels(folder.base_runs, names)
    runs = [run_curves(labels[name], folder.base_runs[name]) for name in names]
    names = distinct_runs(folder, folder.proxies)
    proxies = [run_curves(f"proxy {name}", folder.proxies[name]) for name in names]
    if not any(len(run.total) for run in (*runs, *proxies)):
        return None
    caption = (
        "The top panel shows all domains together; each other panel shows one. Thin lines are the "
        "recorded losses, bold lines their running mean, and dots the losses on held-out text."
    )
    count = len(panel_domains(runs))
    if count > MOST_PANELS:
        caption += (
            f" The panels show {MOST_PANELS} of {count} domains: those whose last smoothed losses "
            "differ most between the runs."
        )
    return Picture("loss", "Training loss", caption, loss_figure(runs, proxies))


def loss_figure(runs: Sequence[RunCurves], proxies: Sequence[RunCurves] = ()) -> Figure:
    """Draw the training loss of all runs in one panel, and domains in small panels.

    If there are more than ``MOST_PANELS`` domains, the panels show those whose last losses differ
    most between runs, or the first ones. Thin lines are recorded losses, bold lines their running
    mean; dots are losses on held-out text. Domain panels omit the first tenth of the steps, whose
    high losses would flatten the curves.
    """
    ranges = panel_domains(runs)
    chosen = ranges.sort_values(ascending=False, kind="stable").index[:MOST_PANELS]
    names = [name for name in ranges.index if name in chosen]
    columns = min(5, max(3, round(len(names) ** 0.5)))
    rows = -(-len(names) // columns)
    figure = new_figure(9.5, 4.2 + 1.75 * rows)
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[2.0] + [1.0] * rows)
    axes = figure.add_subplot(grid[0, :])
    styles = [LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)] for i in range(len(runs))]
    handles = [_draw_curve(axes, r.total, color_of(i), styles[i]) for i, r in enumerate(runs)]
    handles += [
        _draw_curve(axes, run.total, PROXY_COLOR, LINE_STYLES[(i + 1) % len(LINE_STYLES)])
        for i, run in enumerate(proxies)
    ]
    axes.set_title("Training loss, all domains (bold: running mean)", fontsize=11, loc="left")
    axes.margins(x=0.01)
    axes.set_ylabel("loss (nats per token)")
    tidy(axes)
    for i, name in enumerate(names):
        panel = figure.add_subplot(grid[1 + i // columns, i % columns])
        for j, run in enumerate(runs):
            for curves in (run.domains, run.validation):
                if name not in curves:
                    continue
                curve = curves[name]
                curve = curve[curve.index > 0.1 * curve.index.max()]
                if curves is run.domains:
                    _draw_curve(panel, curve, color_of(j), styles[j], width=1.4)
                else:
                    panel.plot(curve.index, curve, "o", color=color_of(j), markersize=3.5)
        panel.tick_params(labelsize=8)
        panel.set_xlim(left=0)
        tidy(panel)
        title = shortened(name, NAME_LIMIT if columns < 5 else NARROW_LIMIT)
        panel.set_title(title, fontsize=9, loc="left", parse_math=False)
        panel.tick_params(labelbottom=i + columns >= len(names))
    if names:
        figure.supxlabel("training step (domain panels leave out the first tenth)", fontsize=10)
    else:
        axes.set_xlabel("training step")
    labels = [run.label for run in (*runs, *proxies)]
    if any(run.validation for run in runs):
        handles.append(Line2D([], [], color=REFERENCE_COLOR, marker="o", linestyle="none", ms=4))
        labels.append("held-out text")
    legend_above(figure, handles, labels)
    return figure


def _draw_curve(
    axes: Axes, curve: pd.Series[float], color: str, style: str, width: float = 1.8
) -> Line2D:
    """Draw the curve thin and its running mean bold; return the bold line."""
    bold = smoothed(curve)
    if smoothing_window(curve) > 1:
        axes.plot(curve.index, curve, color=color, linewidth=0.6, alpha=0.35)
    marker = "o" if len(curve) == 1 else None
    (line,) = axes.plot(bold.index, bold, color=color, ls=style, linewidth=width, marker=marker)
    return line


def sweep_picture(axes: Sequence[SweptAxis]) -> Picture:
    """Plot weights over the values of each hyperparameter, with intervals as thin bars.

    Values are evenly spaced. All panels share one scale; a dashed line marks the common centre.

    Args:
        axes: at least one axis, all with the same domains; each becomes a panel.
    """
    first = axes[0]
    by_weight = np.argsort(-first.weights.iloc[:, first.centre].to_numpy(), kind="stable")
    named = sorted(by_weight[:MOST_NAMED].tolist())
    others = sorted(by_weight[MOST_NAMED:].tolist())
    labels = [*first.weights.index[named], *(["other domains"] if others else []), "centre"]
    width = max(6.4, 3.3 * len(axes))
    figure = new_figure(width, 4.4)
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    # Lines are shifted so that their bars do not overlap.
    shift = min(0.36, 0.04 * (len(named) - 1))
    shifts = np.linspace(-shift / 2, shift / 2, len(named))
    handles: list[Artist] = []
    for panel, axis in zip(panels, axes, strict=True):
        values = list(axis.weights)
        positions = np.arange(len(values), dtype=np.float64)
        for k in others:
            panel.plot(positions, axis.weights.iloc[k], color=PROXY_COLOR, linewidth=0.6, alpha=0.5)
        handles = []
        for number, k in enumerate(named):
            x, color, turn = positions + shifts[number], color_of(number), number // len(COLORS)
            low, high = axis.intervals[:, k].T
            panel.vlines(x, low, high, color=color, linewidth=0.9, alpha=0.7)
            look = {"marker": "os^"[turn], "ls": LINE_STYLES[turn], "ms": 4, "linewidth": 1.4}
            handles += panel.plot(x, axis.weights.iloc[k], color=color, **look)
        if others:
            handles.append(Line2D([], [], color=PROXY_COLOR, linewidth=0.6))
        handles.append(
            panel.axvline(axis.centre, color=REFERENCE_COLOR, ls="--", linewidth=0.9, zorder=0.5)
        )
        panel.set_xticks(positions, [shortened(v, 14) for v in values], parse_math=False)
        panel.set_xlim(-0.5, len(values) - 0.5)
        panel.set_xlabel(axis.label, parse_math=False)
        moved, distance = axis.changes.abs().max(axis=None), axis.distances.max()
        title = f"largest change {moved:.3f}, total variation {distance:.3f}"
        panel.set_title(title, fontsize=8.5, loc="left")
        tidy(panel, "y")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("weight (share of training tokens)")
    figure.supxlabel("flat lines: stable weights; bars: bootstrap intervals, if any", fontsize=9)
    legend_above(figure, handles, labels)
    caption = (
        "Each panel is for a hyperparameter, and each line for a domain; a flat line is a weight "
        "that does not depend on the hyperparameter. The dashed line is the centre of the sweep."
    )
    return Picture("stability", "Stability of the weights", caption, figure)


@dataclasses.dataclass(frozen=True, eq=False)
class WindowMap:
    """A sample of the windows of an embedding store in two dimensions.

    Attributes:
        points: [n, 2] float32; only distances between them are meaningful.
        domains: [n] index into ``names``, int64.
        names: domain names in the order of the store; each domain has a point.
        summary: caption that states the number of windows and the projection.
    """

    points: Array
    domains: NDArray[np.int64]
    names: tuple[str, ...]
    summary: str

    @property
    def centroids(self) -> NDArray[np.float64]:
        """Mean of the points of each domain, [k, 2] float64."""
        return pd.DataFrame(self.points.astype(np.float64)).groupby(self.domains).mean().to_numpy()


def window_map(folder: RunFolder, projection: Projection = "umap") -> WindowMap | None:
    """Project windows of the embedding store with the most domains to two dimensions.

    The projection is UMAP (McInnes et al. 2018) if umap-learn is installed and there are at least
    200 windows, and PCA otherwise. On one machine, equal stores give equal maps; UMAP maps differ
    between machines.

    Args:
        folder: run folder; if none of its embedding stores has three windows, the result is None.
        projection: "pca" never uses UMAP.

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
    uses_umap = projection == "umap" and len(vectors) >= FEWEST_FOR_UMAP
    points = umap_points(vectors) if uses_umap else None
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

    The sign of each direction is chosen so that its entry of largest magnitude is positive.

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
    """Embed ``vectors`` [n, h] by UMAP, [n, 2]; None if umap-learn is not installed."""
    try:
        from threadpoolctl import threadpool_limits
        from umap import UMAP  # imported here, since the import compiles code for seconds
    except ImportError:
        return None
    # Restore OpenMP's number of threads, which Numba sets for the whole process, torch included.
    with threadpool_limits(limits=1, user_api="openmp"), warnings.catch_warnings():
        # UMAP warns of isolated points, and that a seed implies one thread.
        warnings.simplefilter("ignore")
        found = UMAP(
            n_neighbors=NEIGHBOURS, min_dist=MIN_DIST, random_state=SEED, n_jobs=1
        ).fit_transform(vectors)
    return np.asarray(found, dtype=np.float32)


def windows_picture(found: WindowMap | None) -> Picture | None:
    """Draw every window as a point, coloured by domain, with a legend next to the map.

    At most ``MOST_NAMED`` domains, those with distant centroids, are in the legend; others are
    grey. None without a map.
    """
    if found is None:
        return None
    named = named_domains(found)
    figure = new_figure(9.0, 6.0)
    axes = figure.add_subplot()
    size = float(np.clip(120 / np.sqrt(len(found.points)), 2.6, 6.0))
    others = ~np.isin(found.domains, named)
    handles: list[Artist] = []
    labels = [shortened(found.names[domain], NAME_LIMIT) for domain in named]
    # Edges would hide a small marker. Rasterized points keep a PDF small.
    style: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0, "rasterized": True}
    grey: dict[str, Any] = {"color": PROXY_COLOR, "marker": "o"}
    if others.any():
        axes.plot(*found.points[others].T, markersize=0.8 * size, alpha=0.25, **grey, **style)
        size = 6.0  # larger points make named domains stand out
    for number, domain in enumerate(named):
        marker = "o^s"[number // len(COLORS)]
        look: dict[str, Any] = {"color": color_of(number), "marker": marker}
        points = found.points[found.domains == domain].T
        axes.plot(*points, markersize=size, alpha=0.65, **look, **style)
        handles.append(Line2D([], [], linestyle="none", ms=6.0, **look))
    if others.any():
        handles.append(Line2D([], [], linestyle="none", ms=4, **grey))
        labels.append(f"{len(found.names) - len(named):,} other domains")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(PROXY_COLOR)
    axes.set_xlabel(shortened(found.summary, 130), fontsize=8.5, parse_math=False)
    plain_legend(figure, handles, labels, loc="outside right upper", fontsize=8.5)
    caption = (
        "Each point is a window of text; windows with similar embeddings are close to each other: "
        f"{found.summary}."
    )
    return Picture("windows", "Map of window embeddings", caption, figure)


def named_domains(found: WindowMap) -> list[int]:
    """Indices of the domains with a colour: all, or the ``MOST_NAMED`` that cover the map best.

    The choice is greedy: first the domain whose centroid is farthest from the middle, then
    repeatedly the domain whose centroid is farthest from all chosen centroids.
    """
    centres, chosen = found.centroids, list[int]()
    nearest = np.linalg.norm(centres - centres.mean(axis=0), axis=1)
    for _ in range(min(len(centres), MOST_NAMED)):
        chosen.append(int(nearest.argmax()))
        distances = np.linalg.norm(centres - centres[chosen[-1]], axis=1)
        nearest = np.minimum(nearest, distances) if len(chosen) > 1 else distances
        nearest[chosen] = -1.0
    return sorted(chosen)


def new_figure(width: float, height: float) -> Figure:
    """Create an empty white figure; ``width`` and ``height`` are in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def legend_above(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Add a legend above all axes; a long legend makes the figure taller."""
    longest = max((display_width(shortened(label, LABEL_LIMIT)) for label in labels), default=0)
    columns = max(1, min(4, len(labels), int(figure.get_figwidth() / (0.65 + 0.085 * longest))))
    more_rows = max(0, -(-len(labels) // columns) - LEGEND_ROWS)
    figure.set_figheight(figure.get_figheight() + more_rows * LEGEND_ROW_HEIGHT)
    plain_legend(figure, handles, labels, loc="outside upper center", ncols=columns)


def plain_legend(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], **look: Any
) -> None:
    """Add a legend that shows ``labels`` literally, shortened."""
    plain = [f"{i}" for i in range(len(labels))]  # matplotlib omits labels that start with "_"
    legend = figure.legend(handles, plain, frameon=False, **look)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(shortened(label, LABEL_LIMIT))


def color_of(index: int) -> str:
    """The colour of series number ``index``; colours repeat cyclically."""
    return COLORS[index % len(COLORS)]


def tidy(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Remove the frame except for the two axes, and draw ``grid`` lines behind the data."""
    axes.grid(axis=grid, color=GRID_COLOR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
