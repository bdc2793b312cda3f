"""Loss curves of a training run, from its metrics."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError

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
    """Read the metrics of ``run``. A domain has a point at each step that recorded it.

    Raises:
        UserError: for a record that is damaged, naming the file and the record.
    """
    points: dict[str, list[tuple[float, float]]] = {"": []}
    training: dict[str, list[tuple[float, float]]] = {}
    validation: dict[str, list[tuple[float, float]]] = {}
    for number, record in enumerate(run.metrics(), start=1):
        where = f"{run.root / METRICS_NAME}: record {number}"
        step = _number(record, "step", where) if isinstance(record, dict) else None
        if step is None:
            raise UserError(f"{where}: field step is missing; remove the line")
        loss = _number(record, "loss", where)
        if loss is not None:
            points[""].append((step, loss))
        for field, found in (("domain_loss", training), ("validation_loss", validation)):
            for name, value in _losses(record, field, where):
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


def _losses(record: dict[str, Any], field: str, where: str) -> Iterator[tuple[str, float]]:
    losses = record.get(field) or {}
    if not isinstance(losses, dict):
        raise UserError(f"{where}: field {field}: an object is expected; remove the line")
    for name in losses:
        value = _number(losses, name, f"{where}: field {field}")
        if value is not None:
            yield name, value


def _number(record: dict[str, Any], field: str, where: str) -> float | None:
    """The number in ``field``; None where there is none (null: nothing was measured)."""
    value = record.get(field)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise UserError(f"{where}: field {field}: a number is expected; remove the line")


def _running_mean(values: Array, window: int) -> Array:
    if window == 1:
        return values
    return np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
