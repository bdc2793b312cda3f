"""The picture of a head-to-head: average perplexity against the cost to obtain the mixture."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron_chameleon.report.figures import GRID_COLOR, color_of, legend_above, new_figure, tidy
from megatron_chameleon.report.head_to_head.compare import HeadToHead

# Mixtures without cost stand so many times further left than the cheapest, those of unknown cost as
# far right of the dearest, each a step apart.
FREE_GAP, FREE_STEP = 10.0, 1.3


def head_to_head_figure(compared: HeadToHead) -> Figure:
    """A dot for each base model and a bar at each mixture's mean.

    FLOPs are on a logarithmic axis, on which those that took none have a place with a word on the
    left, and those of which it is not known one on the right.
    """
    figure = new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    flops = np.array([c.amounts["flops"] for c in compared], dtype=np.float64)  # None is nan
    places = places_of(flops)
    handles = []
    for i, averages in enumerate(compared.averages):
        color = color_of(i)
        marker = "o" if i < 7 else "s"  # the colours come round again
        (dots,) = axes.plot(
            np.full(len(averages), places[i]), averages, marker, color=color, ms=4.5, ls="none"
        )
        axes.plot(places[i], averages.mean(), "_", color=color, ms=20, mew=2)
        handles.append(dots)
    axes.set_xscale("log")
    ticks = ticks_of(flops, places)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("FLOPs to obtain the mixture")
    axes.set_ylabel("average held-out perplexity")
    axes.grid(color=GRID_COLOR)
    tidy(axes)
    legend_above(figure, handles, [c.label for c in compared])
    return figure


def places_of(flops: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where mixtures stand on the axis: those of no FLOPs on the left, of unknown (nan) right."""
    is_free, is_unknown = flops == 0, np.isnan(flops)
    costs = flops[flops > 0] if (flops > 0).any() else np.array([FREE_GAP])
    places = flops.copy()
    places[is_free] = costs.min() / FREE_GAP / FREE_STEP ** np.arange(is_free.sum())[::-1]
    places[is_unknown] = costs.max() * FREE_GAP * FREE_STEP ** np.arange(is_unknown.sum())
    return places


def ticks_of(flops: NDArray[np.float64], places: NDArray[np.float64]) -> dict[float, str]:
    """Place -> text: "none" or "unknown" where those stand, round figures along the others."""
    costs = flops[flops > 0]
    ticks = {}
    for word, those in (("none", flops == 0), ("unknown", np.isnan(flops))):
        if those.any():
            ticks[float(np.exp(np.log(places[those]).mean()))] = word
    if costs.size:
        exponents = np.arange(np.floor(np.log10(costs.min())), np.ceil(np.log10(costs.max())) + 1)
        steps = (1, 2, 5) if len(exponents) < 4 else (1,)
        rounds = [step * 10**exponent for exponent in exponents for step in steps]
        ticks |= {x: f"{x:.0e}" for x in rounds if costs.min() / 2 <= x <= costs.max() * 2}
    return ticks
