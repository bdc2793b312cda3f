"""The picture of a sweep: a panel per axis, a line per domain. Flat lines are stable weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_chameleon.report.figures import (
    COLORS,
    GRID_COLOR,
    HEIGHT_OF_A_ROW,
    PROXY_COLOR,
    REFERENCE_COLOR,
    ROWS_OF_A_LEGEND,
    color_of,
    legend_above,
    legend_columns,
    new_figure,
    tidy,
)
from megatron_chameleon.report.names import shortened
from megatron_chameleon.report.stability import StabilityAxis

MARKERS, LINE_STYLES = "os^", ("solid", "dashed", "dotted")
# Of more domains than there are colours and markers, those of the largest weights have them.
MOST_LINES = len(COLORS) * len(MARKERS)
# So that bars do not overlap, lines are this part of the way to the next value apart; many lines
# share what they may take in all.
STEP, MOST_SPREAD = 0.04, 0.36
TICK_LIMIT = 14


def stability_figure(axes: Sequence[StabilityAxis]) -> Figure:
    """Weights [n, k] over the values of each knob, with their intervals as thin bars.

    Values stand side by side, whatever lies between them. All panels have the same scale of
    weights; a dashed line marks the centre, which they have in common.

    Args:
        axes: at least one, of the same domains.
    """
    first = axes[0]
    by_weight = np.argsort(-first.weights[first.centre], kind="stable")
    named = sorted(by_weight[:MOST_LINES].tolist())
    others = sorted(by_weight[MOST_LINES:].tolist())
    labels = [first.names[k] for k in named]
    labels += [*(["other domains"] if others else []), "centre"]
    width = max(6.4, 3.3 * len(axes))
    rows = -(-len(labels) // legend_columns(width, labels))
    figure = new_figure(width, 3.9 + HEIGHT_OF_A_ROW * min(rows, ROWS_OF_A_LEGEND))
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    handles: list[Artist] = []
    for panel, axis in zip(panels, axes, strict=True):
        handles = _draw_axis(panel, axis, named, others)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("weight (share of training tokens)")
    figure.supxlabel(f"flat lines: weights that do not depend on the knob{_bars(axes)}", fontsize=9)
    legend_above(figure, handles, labels)
    return figure


def _draw_axis(
    panel: Axes, axis: StabilityAxis, named: Sequence[int], others: Sequence[int]
) -> list[Artist]:
    """Draw one panel; the handles of its lines, for the legend."""
    positions = np.arange(len(axis.values), dtype=np.float64)
    for k in others:
        panel.plot(positions, axis.weights[:, k], color=PROXY_COLOR, linewidth=0.6, alpha=0.5)
    spread = min(MOST_SPREAD, STEP * (len(named) - 1))
    shifts = np.linspace(-spread / 2, spread / 2, len(named))
    handles: list[Artist] = [
        _draw_domain(panel, axis, k, positions + shift, number)
        for number, (k, shift) in enumerate(zip(named, shifts, strict=True))
    ]
    if others:
        handles.append(Line2D([], [], color=PROXY_COLOR, linewidth=0.6))
    centre = panel.axvline(
        axis.centre, color=REFERENCE_COLOR, linestyle="--", linewidth=0.9, zorder=0.5
    )
    panel.set_xticks(positions, [shortened(v, TICK_LIMIT) for v in axis.values], parse_math=False)
    panel.set_xlim(-0.5, len(axis.values) - 0.5)
    panel.set_xlabel(axis.label, parse_math=False)
    moved, distance = np.abs(axis.changes).max(), axis.distances.max()
    panel.set_title(
        f"largest change {moved:.3f}, total variation {distance:.3f}", fontsize=8.5, loc="left"
    )
    panel.grid(axis="y", color=GRID_COLOR)
    tidy(panel)
    return [*handles, centre]


def _draw_domain(
    panel: Axes, axis: StabilityAxis, k: int, positions: np.ndarray, number: int
) -> Artist:
    turn = number // len(COLORS) % len(MARKERS)
    color, marker, style = color_of(number), MARKERS[turn], LINE_STYLES[turn]
    low, high = axis.intervals[:, k].T
    # From end to end: the weight itself may lie outside of a bootstrap interval.
    panel.vlines(positions, low, high, color=color, linewidth=0.9, alpha=0.7)
    (line,) = panel.plot(
        positions, axis.weights[:, k], color=color, marker=marker, ls=style, ms=4, linewidth=1.4
    )
    handle: Artist = line
    return handle


def _bars(axes: Sequence[StabilityAxis]) -> str:
    """What the bars are, for the caption."""
    if all(np.isnan(axis.intervals).all() for axis in axes):
        return ""
    coverages = {axis.confidence for axis in axes}
    coverage = coverages.pop() if len(coverages) == 1 else None
    return f"; bars: {f'{100 * coverage:g}% ' if coverage else ''}bootstrap intervals"
