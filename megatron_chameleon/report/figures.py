"""The pictures of a report: domain weights, domain affinity, loss curves.

Every function takes the data it draws and returns a figure of its own; pyplot and its global state
are not used. Colours are from Okabe and Ito's palette and from a diverging map, both of which can
be told apart with a colour-vision deficiency.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.report.curves import Curve, RunCurves
from megatron_chameleon.report.names import display_width, shortened
from megatron_chameleon.report.shown_domains import bar_domains, count_of_domains, panel_domains

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PROXY_COLOR = "#777777"
REFERENCE_COLOR = "#444444"
GRID_COLOR = "#DDDDDD"
LINE_STYLES = ("solid", "dashed", "dotted", "dashdot")
DIVERGING = "RdBu_r"
DPI = 130
NAME_LIMIT = 26
# In a legend, and in a narrow panel.
LABEL_LIMIT, NARROW_LIMIT = 40, 19
MOST_COLUMNS = 4
# A legend of more rows makes the figure higher, by so many inches for each.
ROWS_OF_A_LEGEND, HEIGHT_OF_A_ROW = 3, 0.21
# Beyond these, numbers in cells and names on axes would overlap.
CELLS_WITH_NUMBERS = 12
NAMES_ON_AN_AXIS = 60
# Inches that the bars of many domains share.
MOST_BARS_HEIGHT = 22.0
# Of a curve in a panel more points than these are not seen, and all panels share so many.
POINTS_OF_A_CURVE, POINTS_OF_ALL_CURVES = (60, 800), 12_000
# Of what is written on a colour, which is the same on any background.
DARK_SIGN, LIGHT_SIGN = "#111111", "#FDFDFD"
LOSS_UNIT = "nats per token"


def png(figure: Figure) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def pdf(figure: Figure) -> bytes:
    """The figure as PDF; equal figures give equal bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="pdf", metadata={"CreationDate": None})
    return stream.getvalue()


def settle(figure: Figure) -> None:
    """Lay out ``figure`` once for all the files that are made of it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def weights_figure(mixtures: Mapping[str, Mixture]) -> Figure:
    """Bars of the weight per domain, a group per domain with one bar for each mixture.

    Args:
        mixtures: label -> mixture, at least one. Domains are sorted by the first one's weights,
            the largest on top; of very many those with the largest weights are drawn. Intervals
            are drawn where a mixture has them.
    """
    names, count = bar_domains(mixtures), count_of_domains(mixtures)
    thickness = 0.8 / len(mixtures)
    height = len(names) * max(0.34, 0.19 * len(mixtures))
    figure = new_figure(8.0, 1.6 + min(height, MOST_BARS_HEIGHT))
    axes = figure.add_subplot()
    handles: list[Artist] = []
    for i, mixture in enumerate(mixtures.values()):
        positions = np.arange(len(names)) + (i + 0.5) * thickness - 0.4
        weights = [mixture.weights.get(name, 0.0) for name in names]
        handles.append(axes.barh(positions, weights, thickness * 0.92, color=color_of(i))[0])
        _draw_intervals(axes, mixture, names, positions)
    handles.append(axes.axvline(1 / count, color=REFERENCE_COLOR, linestyle="--", linewidth=1.2))
    axes.set_yticks(range(len(names)), [shortened(n, NAME_LIMIT) for n in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"weight (share of training tokens){_whiskers(mixtures)}")
    axes.grid(axis="x", color=GRID_COLOR)
    tidy(axes)
    legend_above(figure, handles, [*mixtures, f"uniform (1/{count})"])
    return figure


def affinity_figure(affinity: NDArray[np.float64], names: Sequence[str]) -> Figure:
    """Heat map of the domain affinity [k, k]: white is 0, red positive, blue negative.

    The colours span the entries off the diagonal, since the diagonal (how far a domain lies from
    the mean of all) is often far larger; entries beyond the span have the end's colour.
    """
    count = len(names)
    span = color_span(affinity)
    side = float(np.clip(2.4 + 0.42 * count, 5.0, 14.0))
    figure = new_figure(side + 1.2, side)
    axes = figure.add_subplot()
    image = axes.imshow(affinity, cmap=DIVERGING, vmin=-span, vmax=span, interpolation="nearest")
    every = -(-count // NAMES_ON_AN_AXIS)
    ticks = range(0, count, every)
    labels = [shortened(names[i], NAME_LIMIT) for i in ticks]
    axes.set_yticks(ticks, labels, parse_math=False)
    axes.set_xticks(
        ticks, labels, parse_math=False, rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.tick_params(length=0, labelsize=10 if count <= 30 else 7)
    axes.spines[:].set_visible(False)
    axes.hlines(np.arange(1, count) - 0.5, -0.5, count - 0.5, color="white", linewidth=0.8)
    axes.vlines(np.arange(1, count) - 0.5, -0.5, count - 0.5, color="white", linewidth=0.8)
    if count <= CELLS_WITH_NUMBERS:
        _write_cells(axes, affinity, span)
    beyond = np.abs(affinity).max(initial=0.0) > span
    bar = figure.colorbar(
        image, ax=axes, extend="both" if beyond else "neither", shrink=0.8, aspect=28
    )
    assert bar.solids is not None  # one image in a page, rather than 256 forms
    bar.solids.set_rasterized(True)
    bar.set_label("affinity (inner product of domain embeddings)")
    bar.outline.set_visible(False)
    return figure


def color_span(affinity: NDArray[np.float64]) -> float:
    """Absolute value at the ends of the colour map.

    The largest entry off the diagonal, but no less than a tenth of the largest of all: the
    affinities of nearly orthogonal domains shall look as small as they are.
    """
    size = np.abs(affinity)
    off_diagonal = size[~np.eye(len(affinity), dtype=bool)].max(initial=0.0)
    return float(max(off_diagonal, 0.1 * size.max(initial=0.0))) or 1.0


def loss_figure(runs: Sequence[RunCurves], proxies: Sequence[RunCurves] = ()) -> Figure:
    """Training loss of all runs in one panel, and below it a small panel for each domain.

    Of very many domains some have a panel (``shown_domains.panel_domains``).
    Thin lines are the recorded losses, bold lines their running mean (a curve of few points is
    drawn as it is); dots are losses on held-out text. Panels of domains leave out the first tenth
    of the steps, whose losses would flatten the rest.
    """
    names = panel_domains(runs)
    columns = min(5, max(3, round(len(names) ** 0.5)))
    rows = -(-len(names) // columns)
    figure = new_figure(9.5, 4.2 + 1.75 * rows)
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[2.0] + [1.0] * rows)
    axes = figure.add_subplot(grid[0, :])
    handles = _draw_total(axes, runs, proxies)
    panels = [figure.add_subplot(grid[1 + i // columns, i % columns]) for i in range(len(names))]
    most = int(np.clip(POINTS_OF_ALL_CURVES // (len(names) * len(runs) or 1), *POINTS_OF_A_CURVE))
    limit = NAME_LIMIT if columns < 5 else NARROW_LIMIT
    for i, (panel, name) in enumerate(zip(panels, names, strict=True)):
        _draw_domain(panel, name, runs, most)
        panel.set_title(shortened(name, limit), fontsize=9, loc="left", parse_math=False)
        panel.tick_params(labelbottom=i + columns >= len(names))
    axes.set_ylabel(f"loss ({LOSS_UNIT})")
    if names:
        left_out = "panels of domains leave out the first tenth"
        figure.supxlabel(f"training step ({left_out})", fontsize=10)
    else:
        axes.set_xlabel("training step")
    if any(run.validation for run in runs):
        handles.append(Line2D([], [], color=REFERENCE_COLOR, marker="o", linestyle="none", ms=4))
    labels = [*(run.label for run in (*runs, *proxies)), "held-out text"]
    legend_above(figure, handles, labels[: len(handles)])
    return figure


def _draw_total(
    axes: Axes, runs: Sequence[RunCurves], proxies: Sequence[RunCurves]
) -> list[Line2D]:
    handles = []
    for i, run in enumerate(runs):
        style = LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]
        handles.append(_draw_curve(axes, run.total, color_of(i), style))
    for i, run in enumerate(proxies):
        style = LINE_STYLES[(i + 1) % len(LINE_STYLES)]
        handles.append(_draw_curve(axes, run.total, PROXY_COLOR, style))
    is_smoothed = any(run.total.window > 1 for run in (*runs, *proxies))
    bold = " (bold: running mean)" if is_smoothed else ""
    axes.set_title(f"Training loss, all domains{bold}", fontsize=11, loc="left")
    axes.grid(color=GRID_COLOR)
    axes.margins(x=0.01)
    tidy(axes)
    return handles


def _draw_domain(axes: Axes, name: str, runs: Sequence[RunCurves], most: int) -> None:
    for i, run in enumerate(runs):
        style = LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]
        if name in run.domains:
            curve = _after_the_start(run.domains[name])
            _draw_curve(axes, curve, color_of(i), style, width=1.4, most=most)
        if name in run.validation:
            points = _after_the_start(run.validation[name])
            axes.plot(points.steps, points.losses, "o", color=color_of(i), markersize=3.5)
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID_COLOR)
    axes.set_xlim(left=0)
    tidy(axes)


def _draw_curve(
    axes: Axes,
    curve: Curve,
    color: str,
    style: str = "solid",
    width: float = 1.8,
    most: int = POINTS_OF_A_CURVE[1],
) -> Line2D:
    """Draw the curve thin and its running mean bold; return the bold line.

    Of more than ``most`` points those are drawn that are seen.
    """
    smooth = curve.smoothed().every(most // 2)
    if curve.window > 1:
        thin = curve.outline(most)
        axes.plot(thin.steps, thin.losses, color=color, linewidth=0.6, alpha=0.35)
    marker = "o" if len(curve.steps) == 1 else None
    (line,) = axes.plot(
        smooth.steps, smooth.losses, color=color, linestyle=style, linewidth=width, marker=marker
    )
    return line


def _after_the_start(curve: Curve) -> Curve:
    kept = curve.steps > 0.1 * curve.steps.max(initial=0.0)
    return Curve(curve.steps[kept], curve.losses[kept])


def _draw_intervals(
    axes: Axes, mixture: Mixture, names: Sequence[str], positions: NDArray[np.floating]
) -> None:
    """Whiskers from end to end: the weight itself may lie outside of a bootstrap interval."""
    intervals = mixture.intervals or {}
    there = [i for i, name in enumerate(names) if name in intervals]
    if not there:
        return
    low, high = np.array([intervals[names[i]] for i in there]).T
    axes.errorbar(
        (low + high) / 2,
        positions[there],
        xerr=(high - low) / 2,
        fmt="none",
        ecolor="black",
        elinewidth=1.1,
        capsize=2.5,
    )


def _whiskers(mixtures: Mapping[str, Mixture]) -> str:
    """What the whiskers are, for the axis label."""
    with_intervals = [mixture for mixture in mixtures.values() if mixture.intervals]
    if not with_intervals:
        return ""
    coverages = {f"{100 * m.confidence:g}% " if m.confidence else "" for m in with_intervals}
    return f"; whiskers: {coverages.pop() if len(coverages) == 1 else ''}bootstrap interval"


def _write_cells(axes: Axes, affinity: NDArray[np.float64], span: float) -> None:
    largest = np.abs(affinity).max(initial=0.0)
    form = ".2f" if 0.1 <= largest < 1000 else ".1e"
    for (row, column), value in np.ndenumerate(affinity):
        color = LIGHT_SIGN if abs(value) > 0.6 * span else DARK_SIGN
        text = format(value, form)
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, white."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def legend_above(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """A legend outside of all axes, so that it covers no data; the figure grows by a long one."""
    plain = [f"{i}" for i in range(len(labels))]  # matplotlib gives some names a meaning
    columns = legend_columns(figure.get_figwidth(), labels)
    more_rows = max(0, -(-len(labels) // columns) - ROWS_OF_A_LEGEND)
    figure.set_figheight(figure.get_figheight() + more_rows * HEIGHT_OF_A_ROW)
    legend = figure.legend(handles, plain, loc="outside upper center", ncols=columns, frameon=False)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(shortened(label, LABEL_LIMIT))


def legend_columns(width: float, labels: Sequence[str]) -> int:
    """How many columns of ``labels`` a legend in a figure of ``width`` inches has room for."""
    longest = max((display_width(shortened(label, LABEL_LIMIT)) for label in labels), default=0)
    return max(1, min(MOST_COLUMNS, len(labels), int(width / (0.65 + 0.085 * longest))))


def color_of(index: int) -> str:
    """The colour of the series at ``index``; they come round again."""
    return COLORS[index % len(COLORS)]


def tidy(axes: Axes) -> None:
    """No frame but the two axes, and the grid behind the data."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
