"""How far the weights of a sweep lie apart: its axes as arrays, as tables, and as a picture."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import KnobValue, Mixture, Sweep
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.sweep import FILE_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import REPORT
from megatron_chameleon.report.text_tables import Cell, Row, Table, terminal_table

Array = NDArray[np.float64]

PICTURE = "stability"
CAPTION = "Stability of the weights"
# Any other knob goes by its own name.
KNOB_LABELS = {
    "train_iters": "proxy steps",
    "model_size": "proxy size",
    "ridge": "ridge",
    "num_windows": "windows per domain",
}
# Of more domains those that move most are listed.
MOST_ROWS = 40


@dataclasses.dataclass(frozen=True, eq=False)
class StabilityAxis:
    """The weights of k domains at the n values of one knob.

    Attributes:
        label: what the knob is called.
        values: n texts.
        centre: position of the centre's value.
        names: k domains.
        weights: [n, k].
        intervals: [n, k, 2], the ends of the bootstrap intervals; NaN where there is none.
        confidence: coverage of the intervals, where all have the same.
    """

    label: str
    values: tuple[str, ...]
    centre: int
    names: tuple[str, ...]
    weights: Array
    intervals: Array
    confidence: float | None

    @property
    def changes(self) -> Array:
        """[n, k]: the weights less those at the centre."""
        return self.weights - self.weights[self.centre]

    @property
    def distances(self) -> Array:
        """[n]: total-variation distance to the centre, half the sum of all absolute changes."""
        distances: Array = np.abs(self.changes).sum(axis=1) / 2
        return distances

    @property
    def largest(self) -> tuple[int, int]:
        """Value and domain of the largest absolute change."""
        value, domain = np.unravel_index(np.abs(self.changes).argmax(), self.changes.shape)
        return int(value), int(domain)


def stability_axes(sweep: Sweep) -> list[StabilityAxis]:
    """The axes of ``sweep``, with the weights from the files of its mixtures.

    Raises:
        UserError: if one of them cannot be read, has changed, or has other domains than the first.
    """
    return [_axis(sweep, knob, values) for knob, values in sweep.axes.items()]


def _axis(sweep: Sweep, knob: str, values: list[KnobValue]) -> StabilityAxis:
    points = sweep.along(knob)
    mixtures = [sweep.load_mixture(point) for point in points]
    names = tuple(sweep.load_mixture(sweep.centre).weights)
    for point, mixture in zip(points, mixtures, strict=True):
        if set(mixture.weights) != set(names):
            raise UserError(
                f"{sweep.root / FILE_NAME}: {point.mixture} has other domains than "
                f"{sweep.centre.mixture}; run the sweep again"
            )
    coverages = {mixture.confidence for mixture in mixtures}
    return StabilityAxis(
        label=KNOB_LABELS.get(knob, knob),
        values=tuple(map(_shown, values)),
        centre=points.index(sweep.centre),
        names=names,
        weights=np.array([[mixture.weights[name] for name in names] for mixture in mixtures]),
        intervals=np.array([_intervals(mixture, names) for mixture in mixtures]),
        confidence=coverages.pop() if len(coverages) == 1 else None,
    )


def _shown(value: KnobValue) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _intervals(mixture: Mixture, names: tuple[str, ...]) -> list[tuple[float, float]]:
    known, unknown = mixture.intervals or {}, (np.nan, np.nan)
    return [known.get(name, unknown) for name in names]


def stability_table(axis: StabilityAxis) -> Table:
    """A row per domain with its weight at each value, and below how far that is from the centre."""
    largest = np.abs(axis.changes).max(axis=0)
    shown = sorted(np.argsort(-largest, kind="stable")[:MOST_ROWS])
    headings = [
        f"{value} (centre)" if i == axis.centre else value for i, value in enumerate(axis.values)
    ]
    rows = tuple(
        (
            Cell(axis.names[k]),
            *(Cell(f"{weight:.4f}") for weight in axis.weights[:, k]),
            Cell(f"{largest[k]:.4f}"),
        )
        for k in shown
    )
    hidden = len(axis.names) - len(rows)
    others = (f"{hidden} other domains move by less.",) if hidden else ()
    return Table(
        title=f"Weights over {axis.label}",
        header=("domain", *headings, "largest change"),
        rows=rows,
        summary=_distances(axis),
        notes=(*others, f"{stability_words(axis)}."),
    )


def _distances(axis: StabilityAxis) -> tuple[Row, ...]:
    changes = np.abs(axis.changes).max(axis=1)
    return tuple(
        (Cell(name), *(Cell(f"{figure:.4f}") for figure in figures), Cell(f"{figures.max():.4f}"))
        for name, figures in (("largest change", changes), ("total variation", axis.distances))
    )


def stability_words(axis: StabilityAxis) -> str:
    """The largest change and the largest distance of an axis, in a sentence."""
    value, domain = axis.largest
    change, distance = axis.changes[value, domain], axis.distances.max()
    if not distance:
        return f"Over {axis.label} no weight changes"
    return (
        f"Over {axis.label} a weight changes by {abs(change):.4f} at most ({axis.names[domain]} "
        f"{change:+.4f} at {axis.values[value]}), the mixture by {distance:.4f} in total variation"
    )


def report_stability(sweep: Sweep) -> None:
    """Print the tables of ``sweep`` and its cost, and draw the picture into its 7-report.

    Raises:
        UserError: if a mixture cannot be read or the picture cannot be written.
    """
    from megatron_chameleon.report.figures import pdf, png
    from megatron_chameleon.report.stability_figure import stability_figure

    axes = stability_axes(sweep)
    figure = stability_figure(axes)
    written = []
    for suffix, content in (("png", png(figure)), ("pdf", pdf(figure))):
        written.append(sweep.root / REPORT / f"{PICTURE}.{suffix}")
        with replacing(written[-1]) as temporary:
            temporary.write_bytes(content)
    tables = "\n\n\n".join(terminal_table(stability_table(axis)) for axis in axes)
    cost, centre = sweep.cost, sweep.root / sweep.centre.mixture
    print(
        f"\n{tables}\n\n"
        f"{len(sweep.points)} mixtures took {cost.flops:.2e} FLOPs and "
        f"{cost.device_seconds / 3600:.3g} device hours, with all that was there already\n"
        f"written to {sweep.root / FILE_NAME}, {written[0]} and {written[1]}\n"
        f"next: tools/pretrain_gpt.py --mixture {centre}, or another one of {centre.parent}",
        flush=True,
    )
