"""Sweeps: compute the same mixture several times, with one hyperparameter changed at a time.

Xie, Tonin, Cevher: Chameleon, ICML 2025, tables of weights over proxy steps, proxy sizes, ridges
and numbers of windows.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EmbeddingStore,
    Mixture,
    SettingValue,
    Sweep,
    SweepPoint,
    TrainingRun,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders, step_folder
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.mixing_laws import layer_parameters
from megatron_chameleon.methods.options import PriorOptions, ProxyOptions
from megatron_chameleon.methods.sweep import SharedSweepOptions, Values
from megatron_chameleon.methods.train_proxy import forward_only, on_rank_0, training_options
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.stopping import StopRequests

_FORMATS = {"model": "{}", "steps": "{:,} steps", "train_iters": "of a run of {:,}"}
# Folders of a sweep. Its mixtures have a subfolder, because the report lists the mixtures directly
# in 4-mixture as candidates for training.
PROXIES, STORES, MIXTURES = "2-proxy", "3-embeddings", "4-mixture/sweep"
RULE_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """One mixture of a sweep; points share the artifacts that do not differ.

    Attributes:
        values: its hyperparameters.
        mixture: file of the mixture.
        made_from: folders of the runs and stores that the mixture is computed from.
        check: raises UserError for a mistake that would end the computation.
        compute: writes the mixture; False after a stop signal. Called on every rank.
    """

    values: Values
    mixture: Path
    made_from: tuple[Path, ...]
    check: Callable[[], object]
    compute: Callable[[StopRequests], bool]


def sweep_mixture(options: SharedSweepOptions) -> Sweep | None:
    """Compute the mixture of every point and write sweep.json. Called on every rank.

    Existing artifacts are reused, so that an interrupted sweep resumes.

    Returns:
        The record that was written, the same on every rank; None after a stop signal.

    Raises:
        UserError: before any training, if the options or the files that they name are invalid;
            during the sweep, if training or an embedding fails.
    """
    stops = StopRequests(options.proxy.stopping)
    with distributed(forward_only(options.proxy.parallel), seed=0) as layout:
        axes, every = from_main(lambda: plan_sweep(options))
        made_by = from_main(
            lambda: provenance(options, {"corpus": Corpus.load(options.corpus).hash})
        )
    points = [point_of(options, values) for values in every]
    for number, point in enumerate(points, start=1):
        if layout.is_main:
            print(f"\npoint {number} of {len(points)}: {format_values(options, point.values)}")
        if not point.compute(stops):
            if layout.is_main:
                print(f"stopped in point {number} of {len(points)}; run again to resume")
            return None

    def write() -> Sweep:
        root, cost, rows = options.output, Cost(), []
        for point in points:
            mixture = Mixture.load(point.mixture)
            cost += mixture.cost
            path, *inputs = (
                each.relative_to(root).as_posix() for each in (point.mixture, *point.made_from)
            )
            rows.append(SweepPoint(point.values, path, mixture.hash, inputs))
        spent = Cost()  # several points may use a folder, whose cost is added only once
        for folder in dict.fromkeys(folder for point in points for folder in point.made_from):
            kind = TrainingRun if TrainingRun.exists(folder) else EmbeddingStore
            spent += kind.load(folder).cost
        sweep = Sweep(root, options.method, axes, rows, made_by, cost + spent)
        sweep.save()
        return sweep

    return on_rank_0(options.proxy.parallel, write)


def plan_sweep(options: SharedSweepOptions) -> tuple[dict[str, list[SettingValue]], list[Values]]:
    """Plan the axes and the points; validate them and the files that they name. Writes nothing.

    Returns:
        Hyperparameter to vary -> its sorted distinct values, including that of the centre, except
        for ``steps``; and the points: the centre first, then the other points axis by axis.

    Raises:
        UserError: for the first mistake found.
    """
    axes, method = dict[str, list[SettingValue]](), options.method
    centre: Values = {
        "model": options.proxy.model,
        "steps": options.proxy.train_iters,
        "train_iters": options.proxy.train_iters,
    }
    centre |= options.METHODS[method].centre(options)
    fields = dataclasses.fields(options.axes)
    for field in fields:
        values, name = getattr(options.axes, field.name), field.name.removeprefix("sweep_")
        if values is None:
            continue
        flag = name.replace("_", "-")
        if not values:
            raise UserError(f"--sweep-{flag}: pass at least one value, or omit the option")
        if name == "steps":
            axes[name] = sorted(set(values))
            continue
        if name not in centre:
            raise UserError(
                f"--sweep-{flag}: --method {method} has no --{flag}, or its value at the centre is "
                f"relative; omit --sweep-{flag}, or set an absolute --{flag}"
            )
        distinct = dict.fromkeys([centre[name], *values])
        if name == "model":  # sorted by the number of parameters without the embedding
            axes[name] = sorted(distinct, key=lambda model: layer_parameters(str(model)))
        else:
            axes[name] = sorted(distinct, key=float)
    if not axes:
        flags = (f"--{field.name.replace('_', '-')}" for field in fields)
        raise UserError(f"nothing to vary: pass at least one of {', '.join(flags)}")
    points = [centre]
    for name, each in axes.items():
        shared = {"train_iters": each[-1]} if name == "steps" else {}
        along = [{**centre, **shared, name: value} for value in each]
        points += [point for point in along if point != centre]
    for point in points:
        try:
            point_of(options, point).check()
        except UserError as error:
            raise UserError(f"point '{format_values(options, point)}': {error}") from error
    return axes, points


def format_values(options: SharedSweepOptions, values: Values) -> str:
    """Format a point for a message, such as '82m, 2,000 steps, 4,096 windows, ridge 10'."""
    shown = dict(values)
    if shown.get("steps") == shown.get("train_iters"):
        del shown["train_iters"]
    axes = options.METHODS[options.method].axes
    forms = _FORMATS | {name: axis.form for name, axis in axes.items()}
    return ", ".join(forms[name].format(value) for name, value in shown.items())


def point_of(options: SharedSweepOptions, values: Values) -> Point:
    """Construct a point of the sweep: its files, and the function that computes them."""
    proxy = dataclasses.replace(
        options.proxy,
        model=str(values["model"]),
        train_iters=int(values["train_iters"]),
    )
    steps = options.axes.sweep_steps or ()
    if proxy.train_iters == max(steps, default=0):
        kept = tuple(sorted({*proxy.checkpointing.keep_steps, *steps} - {proxy.train_iters}))
        checkpointing = dataclasses.replace(proxy.checkpointing, keep_steps=kept)
        proxy = dataclasses.replace(proxy, checkpointing=checkpointing)
    module, _, name = options.METHODS[options.method].point.partition(":")
    point: Point = getattr(importlib.import_module(module), name)(options, values, proxy)
    return point


def name_of(proxy: ProxyOptions) -> str:
    """Name of a plain run of the proxy."""
    return f"{Path(proxy.model).name}-{proxy.train_iters}steps-seed{proxy.seed}"


def plain_run(options: SharedSweepOptions, proxy: ProxyOptions) -> PretrainOptions:
    """Return the training options of a plain run on a uniform mixture.

    Chameleon's proxy and DoReMi's reference are both plain runs, so sweeps of the two methods in
    one folder share them.
    """
    return training_options(proxy, options.corpus, options.output / PROXIES / name_of(proxy))


def fields_with_rule(
    options: SharedSweepOptions, values: Values, proxy: ProxyOptions, rule: Any
) -> dict[str, Any]:
    """Return the options of a point of a method whose proxy updates the weights by a rule.

    Args:
        options: options of the sweep.
        values: hyperparameters of the point.
        proxy: options of its proxy.
        rule: options of the method's update rule.
    """
    name = f"{options.method}-{name_of(proxy)}"
    resolved, default = (dataclasses.asdict(each.resolve()) for each in (rule, type(rule)()))
    if resolved != default:  # a digest, so that sweeps with different rules can share a folder
        name = f"{name}-{sha256_of_json(resolved)[:RULE_DIGITS]}"
    step, work_dir = int(values["steps"]), options.output / PROXIES / name
    if step != proxy.train_iters:
        name = f"{name}-step{step}"
    return {
        "corpus": options.corpus,
        "output": options.output / MIXTURES / f"{name}.json",
        "work_dir": work_dir,
        "proxy": proxy,
        "fallback": PriorOptions(accept_uncertain=True),  # a sweep is of the method itself
        "rule": rule,
    }


def require_kept(run_dir: Path, step: int) -> None:
    """Raise UserError if the run is past ``step`` and has no checkpoint of it."""
    wanted = step_folder(run_dir, step)
    if not wanted.is_dir() and any(wanted < folder for folder in checkpoint_folders(run_dir)):
        raise UserError(
            f"{run_dir} has no checkpoint of step {step}, since it was trained without this step "
            "in --sweep-steps, or skipped this step; delete the run to train it again, or omit the "
            "step"
        )
