"""Loss curves of a training run, from its metrics."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import TrainingRun

# A curve of this many independent points can be followed by eye.
POINTS_OF_A_SMOOTH_CURVE = 25

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """Losses [n] in nats per token at training ``steps`` [n], float64."""

    steps: Array
    losses: Array

    @property
    def window(self) -> int:
        """Points in the running mean: 1, no smoothing, for a curve of few points."""
        return max(1, len(self.steps) // POINTS_OF_A_SMOOTH_CURVE)

    def smoothed(self) -> Curve:
        """Centred running mean over ``window`` points; half a window is left out at each end."""
        return Curve(*(_running_mean(values, self.window) for values in (self.steps, self.losses)))

    def every(self, most: int) -> Curve:
        """At most ``most`` of the points, evenly, with the first and the last."""
        if len(self.steps) <= most:
            return self
        kept = np.linspace(0, len(self.steps) - 1, most).round().astype(np.int64)
        return Curve(self.steps[kept], self.losses[kept])

    def outline(self, most: int) -> Curve:
        """At most ``most`` of the points: the lowest and the highest of each of many stretches.

        Drawn as a line it looks like the whole curve, where that has more points than the picture.
        """
        if len(self.steps) <= most:
            return self
        losses = np.where(np.isnan(self.losses), np.inf, self.losses)
        ends = np.linspace(0, len(losses), most // 2 + 1).astype(np.int64)
        kept = {
            place
            for start, end in itertools.pairwise(ends.tolist())
            for place in (start + losses[start:end].argmin(), start + losses[start:end].argmax())
        }
        chosen = np.array(sorted(kept), dtype=np.int64)
        return Curve(self.steps[chosen], self.losses[chosen])


@dataclasses.dataclass(frozen=True, eq=False)
class RunCurves:
    """The curves of one run: total training loss, and per domain in training and validation."""

    label: str
    total: Curve
    domains: dict[str, Curve]
    validation: dict[str, Curve]


def run_curves(label: str, run: TrainingRun) -> RunCurves:
    """Read the metrics of ``run``. A domain has a point at each step that recorded it."""
    points: dict[str, list[tuple[float, float]]] = {"": []}
    training: dict[str, list[tuple[float, float]]] = {}
    validation: dict[str, list[tuple[float, float]]] = {}
    for record in run.metrics():
        step, loss = record["step"], record.get("loss")
        if loss is not None:
            points[""].append((step, loss))
        for field, found in (("domain_loss", training), ("validation_loss", validation)):
            for name, value in (record.get(field) or {}).items():
                if value is not None:
                    found.setdefault(name, []).append((step, value))
    return RunCurves(
        label,
        _curve(points[""]),
        {name: _curve(found) for name, found in training.items()},
        {name: _curve(found) for name, found in validation.items()},
    )


def _curve(points: list[tuple[float, float]]) -> Curve:
    steps, losses = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Curve(steps, losses)


def _running_mean(values: Array, window: int) -> Array:
    if window == 1:
        return values
    return np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
