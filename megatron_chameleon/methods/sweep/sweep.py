"""Sweeps: compute the same mixture several times, with one hyperparameter changed at a time.

Xie, Tonin, Cevher: Chameleon, ICML 2025, tables of weights over proxy steps, proxy sizes, ridges
and numbers of windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EmbeddingStore,
    KnobValue,
    Mixture,
    Sweep,
    SweepPoint,
    TrainingRun,
    provenance,
)
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.proxy import forward_only
from megatron_chameleon.methods.sweep.methods import METHODS, Values
from megatron_chameleon.methods.sweep.options import AxisOptions, MethodName, SweepOptions
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.stopping import StopRequests

_FORMATS = {
    "model_size": "{}",
    "train_iters": "{:,} steps",
    "num_windows": "{:,} windows",
    "ridge": "ridge {:g}",
}


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The validated sweep; points are computed in this order."""

    axes: dict[str, list[KnobValue]]
    points: list[Values]
    provenance: Provenance


def sweep_mixture(options: SweepOptions) -> Sweep | None:
    """Compute the mixture of every point and write sweep.json. Called on every rank.

    Existing artifacts are reused, so that an interrupted sweep resumes.

    Returns:
        The record that was written, the same on every rank; None after a stop signal.

    Raises:
        UserError: for a mistake in the options or in what they name, before any training; later,
            as training or embedding does.
    """
    method, stops = METHODS[options.method], StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0) as layout:
        plan, is_main = from_main(lambda: plan_sweep(options)), layout.is_main
    for number, values in enumerate(plan.points, start=1):
        if is_main:
            print(f"\npoint {number} of {len(plan.points)}: {format_values(values)}")
        if not method.compute(options, values, stops):
            if is_main:
                print(f"stopped in point {number} of {len(plan.points)}; run again to resume")
            return None
    with distributed(parallel, seed=0):
        return from_main(lambda: _write_sweep(options, plan))


def plan_sweep(options: SweepOptions) -> SweepPlan:
    """Validate the options and what they name at every point. Writes nothing.

    Raises:
        UserError: for the first mistake found.
    """
    method = METHODS[options.method]
    centre = method.centre(options)
    axes = axes_of(options.axes, centre, options.method)
    points = points_of(axes, centre)
    for values in points:
        try:
            method.check(options, values)
        except UserError as error:
            raise UserError(f"point '{format_values(values)}': {error}") from error
    inputs = {"corpus": Corpus.load(options.corpus).hash}
    return SweepPlan(axes, points, provenance(options, inputs))


def axes_of(options: AxisOptions, centre: Values, method: MethodName) -> dict[str, list[KnobValue]]:
    """Hyperparameter -> its distinct values in order, with the centre's, for those to vary.

    Raises:
        UserError: if there is nothing to vary, or ``centre`` lacks the hyperparameter.
    """
    axes = {}
    for field in dataclasses.fields(options):
        values, name = getattr(options, field.name), field.name.removeprefix("sweep_")
        if values is None:
            continue
        if name not in centre:
            flag = name.replace("_", "-")
            raise UserError(
                f"--sweep-{flag}: --method {method} has no --{flag}, or no absolute value for it "
                f"with these options; leave it out, or set --{flag} for the centre"
            )
        axes[name] = _sorted_values(name, [centre[name], *values])
    if not axes:
        flags = (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))
        raise UserError(f"nothing to vary: pass at least one of {', '.join(flags)}")
    return axes


def points_of(axes: dict[str, list[KnobValue]], centre: Values) -> list[Values]:
    """The centre, then the other points axis by axis, without duplicates."""
    points = [centre]
    for name, values in axes.items():
        points += [{**centre, name: value} for value in values if value != centre[name]]
    return points


def format_values(values: Values) -> str:
    """A point for a message: '82m, 2,000 steps, 4,096 windows, ridge 10'."""
    return ", ".join(form.format(values[name]) for name, form in _FORMATS.items() if name in values)


def _sorted_values(name: str, values: Sequence[KnobValue]) -> list[KnobValue]:
    """Distinct values: numbers by size, models by parameters without the embedding."""
    distinct = list(dict.fromkeys(values))
    if name == "model_size":
        return sorted(
            distinct, key=lambda size: ModelShape(model_size(str(size)), 0, 0).num_parameters
        )
    return sorted(distinct, key=float)


def _write_sweep(options: SweepOptions, plan: SweepPlan) -> Sweep:
    """Write sweep.json from the artifacts of all points, on one rank."""
    method, root = METHODS[options.method], options.output
    points, cost = [], Cost()
    folders: dict[Path, None] = {}  # each counts once, in the order of first use
    for values in plan.points:
        files = method.files(options, values)
        mixture = Mixture.load(files.mixture)
        cost += mixture.cost
        folders |= dict.fromkeys(files.made_from)
        points.append(
            SweepPoint(
                knobs=values,
                mixture=files.mixture.relative_to(root).as_posix(),
                mixture_hash=mixture.hash,
                made_from=[folder.relative_to(root).as_posix() for folder in files.made_from],
            )
        )
    spent = Cost()
    for folder in folders:
        kind = TrainingRun if TrainingRun.exists(folder) else EmbeddingStore
        spent += kind.load(folder).cost
    sweep = Sweep(root, options.method, plan.axes, points, plan.provenance, cost + spent)
    sweep.save()
    return sweep
