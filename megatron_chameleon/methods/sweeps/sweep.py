"""A sweep: the same mixture found again and again, with one knob changed at a time.

Xie, Tonin, Cevher: Chameleon, ICML 2025, tables of the weights over proxy steps, proxy sizes,
ridges and numbers of windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
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
from megatron_chameleon.methods.common.proxy_run import forward_only
from megatron_chameleon.methods.sweeps.chameleon import CHAMELEON
from megatron_chameleon.methods.sweeps.doge import DOGE
from megatron_chameleon.methods.sweeps.doremi import DOREMI
from megatron_chameleon.methods.sweeps.points import (
    Knobs,
    SweptMethod,
    axes_of,
    check_groups,
    points_of,
    told,
)
from megatron_chameleon.options.sweep import Method, SweepOptions
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.stopping import StopRequests

METHODS: dict[Method, SweptMethod] = {"chameleon": CHAMELEON, "doge": DOGE, "doremi": DOREMI}


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What is to be done, in its order."""

    axes: dict[str, list[KnobValue]]
    points: list[Knobs]
    provenance: Provenance


def sweep_mixture(options: SweepOptions) -> Sweep | None:
    """Find the mixture at every point and write sweep.json. Every rank calls this.

    Artifacts that are there are used, so that a sweep goes on where it was stopped.

    Returns:
        The record that was written, the same on every rank; None if the sweep was asked to stop.

    Raises:
        UserError: for a mistake in the options or in what they name, before the first proxy is
            trained; later, for what training or embedding refuses.
    """
    method, stops = METHODS[options.method], StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0) as layout:
        plan, is_main = from_main(lambda: plan_sweep(options)), layout.is_main
    for number, knobs in enumerate(plan.points, start=1):
        if is_main:
            print(f"\npoint {number} of {len(plan.points)}: {told(knobs)}")
        if not method.compute(options, knobs, stops):
            if is_main:
                print(f"stopped in point {number} of {len(plan.points)}; the same command goes on")
            return None
    with distributed(parallel, seed=0):
        return from_main(lambda: write_sweep(options, plan))


def plan_sweep(options: SweepOptions) -> SweepPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    method, name = METHODS[options.method], options.method
    check_groups(options, method)
    centre = method.centre(options)
    axes = axes_of(options.axes, centre, name)
    points = points_of(axes, centre)
    for knobs in points:
        try:
            method.check(options, knobs)
        except UserError as error:
            raise UserError(f"point '{told(knobs)}': {error}") from error
    inputs = {"corpus": Corpus.load(options.corpus).hash}
    return SweepPlan(axes, points, provenance(options, inputs))


def write_sweep(options: SweepOptions, plan: SweepPlan) -> Sweep:
    """Write sweep.json, on one rank, from the artifacts of all points.

    Raises:
        UserError: if one of them cannot be read.
    """
    method, root = METHODS[options.method], options.output
    points, cost = [], Cost()
    folders: dict[Path, None] = {}
    for knobs in plan.points:
        files = method.files(options, knobs)
        mixture = Mixture.load(files.mixture)
        cost += mixture.cost
        folders |= dict.fromkeys(files.made_from)
        points.append(
            SweepPoint(
                knobs=knobs,
                mixture=files.mixture.relative_to(root).as_posix(),
                mixture_hash=mixture.hash,
                made_from=[folder.relative_to(root).as_posix() for folder in files.made_from],
            )
        )
    sweep = Sweep(
        root, options.method, plan.axes, points, plan.provenance, cost + _cost_of(folders)
    )
    sweep.save()
    return sweep


def _cost_of(folders: Iterable[Path]) -> Cost:
    """Of training runs and embedding stores."""
    total = Cost()
    for folder in folders:
        kind = TrainingRun if TrainingRun.exists(folder) else EmbeddingStore
        total += kind.load(folder).cost
    return total
