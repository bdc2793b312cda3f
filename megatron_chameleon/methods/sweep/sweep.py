"""Sweeps: compute the same mixture several times, with one hyperparameter changed at a time.

Xie, Tonin, Cevher: Chameleon, ICML 2025, tables of weights over proxy steps, proxy sizes, ridges
and numbers of windows.
"""

from __future__ import annotations

import dataclasses
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
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.chameleon.compute import (
    compute_mixture,
    default_window_length,
    embedding_recipe,
)
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.doge.compute import Doge
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.doremi.compute import Doremi
from megatron_chameleon.methods.mixing_laws import layer_parameters
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.output import require_training_tokens
from megatron_chameleon.methods.proxy import (
    PROXY,
    forward_only,
    is_finished,
    on_rank_0,
    train_proxy,
    training_options,
)
from megatron_chameleon.methods.sweep import SweepOptions
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window, default_window
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.stopping import StopRequests

Values = dict[str, SettingValue]
"""Name of an option, such as ``ridge`` -> its value at a point of the sweep."""
_FORMATS = {
    "model": "{}",
    "steps": "{:,} steps",
    "train_iters": "of a run of {:,}",
    "num_windows": "{:,} windows",
    "ridge": "ridge {:g}",
}
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


def sweep_mixture(options: SweepOptions) -> Sweep | None:
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
            print(f"\npoint {number} of {len(points)}: {format_values(point.values)}")
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


def plan_sweep(options: SweepOptions) -> tuple[dict[str, list[SettingValue]], list[Values]]:
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
    if method == "chameleon":
        centre["num_windows"] = options.extraction.num_windows
        recipe = options.weighting.resolve()
        if not recipe.ridge_relative:
            centre["ridge"] = recipe.ridge
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
            raise UserError(f"point '{format_values(point)}': {error}") from error
    return axes, points


def format_values(values: Values) -> str:
    """Format a point for a message, such as '82m, 2,000 steps, 4,096 windows, ridge 10'."""
    shown = dict(values)
    if shown.get("steps") == shown.get("train_iters"):
        del shown["train_iters"]
    return ", ".join(form.format(shown[name]) for name, form in _FORMATS.items() if name in shown)


def point_of(options: SweepOptions, values: Values) -> Point:
    """Construct a point of the sweep: its files, and the function that computes them.

    Chameleon's proxy and DoReMi's reference are both plain runs on a uniform mixture, so sweeps of
    the two methods in one folder share them.
    """
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
    name = f"{Path(proxy.model).name}-{proxy.train_iters}steps-seed{proxy.seed}"
    plain = training_options(proxy, options.corpus, options.output / PROXIES / name)
    if options.method == "chameleon":
        return _chameleon_point(options, values, plain)
    flags = options.doge if options.method == "doge" else options.doremi
    rule, default = (dataclasses.asdict(each.resolve()) for each in (flags, type(flags)()))
    name = f"{options.method}-{name}"
    if rule != default:  # a digest, so that sweeps with different rules can share a folder
        name = f"{name}-{sha256_of_json(rule)[:RULE_DIGITS]}"
    step, work_dir = int(values["steps"]), options.output / PROXIES / name
    if step != proxy.train_iters:
        name = f"{name}-step{step}"
    mixture = options.output / MIXTURES / f"{name}.json"
    shared: dict[str, Any] = {
        "corpus": options.corpus,
        "output": mixture,
        "work_dir": work_dir,
        "proxy": proxy,
        "fallback": PriorOptions(accept_uncertain=True),  # a sweep is of the method itself
    }
    if options.method == "doge":
        doge = DogeOptions(rule=options.doge, **shared)

        def check_doge() -> None:
            Doge(doge)
            require_kept(work_dir / PROXY, step)

        return Point(
            values,
            mixture,
            (work_dir / PROXY,),
            check=check_doge,
            compute=lambda stops: Doge.compute(doge, stops, step),
        )
    doremi = DoremiOptions(rule=options.doremi, **shared)
    with_reference = dataclasses.replace(doremi, reference=plain.run_dir)

    def check() -> None:
        check_run_folder(plan_training(plain))
        Doremi(with_reference if is_finished(plain.run_dir) else doremi)
        require_kept(work_dir / PROXY, step)

    def compute(stops: StopRequests) -> bool:
        finished = train_proxy(plain, stops, name="DoReMi's reference")
        return finished and Doremi.compute(with_reference, stops, step)

    return Point(values, mixture, (plain.run_dir, work_dir / PROXY), check, compute)


def require_kept(run_dir: Path, step: int) -> None:
    """Raise UserError if the run is past ``step`` and has no checkpoint of it."""
    wanted = step_folder(run_dir, step)
    if not wanted.is_dir() and any(wanted < folder for folder in checkpoint_folders(run_dir)):
        raise UserError(
            f"{run_dir} has no checkpoint of step {step}, since it was trained without this step "
            "in --sweep-steps, or skipped this step; delete the run to train it again, or omit the "
            "step"
        )


def _chameleon_point(options: SweepOptions, values: Values, run: PretrainOptions) -> Point:
    """Construct a point of Chameleon: a proxy, its embeddings, and the mixture."""
    windows, weighting, step = int(values["num_windows"]), options.weighting, int(values["steps"])
    name, checkpoint = run.run_dir.name, run.run_dir
    if step != run.train_iters:
        name, checkpoint = f"{name}-step{step}", step_folder(run.run_dir, step)
    name = f"{name}-{windows}windows"
    store, name = options.output / STORES / name, f"chameleon-{options.mode}-{name}"
    if "ridge" in values:
        weighting = dataclasses.replace(weighting, ridge=float(values["ridge"]))
        name = f"{name}-ridge{values['ridge']:g}"
    mixture = options.output / MIXTURES / f"{name}.json"
    method = ChameleonOptions(
        corpus=options.corpus,
        checkpoint=checkpoint,
        output=mixture,
        mode=options.mode,
        store=store,
        extraction=dataclasses.replace(options.extraction, num_windows=windows),
        weighting=weighting,
        parallel=forward_only(run.parallel),
    )

    def check() -> None:
        plan, corpus = plan_training(run), Corpus.load(options.corpus)
        check_run_folder(plan)
        require_kept(run.run_dir, step)
        weighting.resolve()
        extraction, config = method.extraction, plan.config
        layer = check_layer(config.num_layers, extraction.layer)
        default = default_window_length(extraction, default_window(config))
        window = check_window(config.max_positions, default, extraction.window_length)
        recipe = embedding_recipe(extraction, "", layer, window, corpus.tokenizer.sha256)
        check_model_layout(config, method.parallel, window)
        if EmbeddingStore.exists(store):
            stored = EmbeddingStore.load(store)
            # The proxy's hash is unknown before its training, so it is not compared.
            model_hash = stored.recipe.model_hash
            stored.require_recipe(dataclasses.replace(recipe, model_hash=model_hash))
        require_training_tokens(corpus, corpus.names, "to embed")

    def compute(stops: StopRequests) -> bool:
        finished = train_proxy(run, stops, name="Chameleon's proxy")
        # A stop signal ends the process while embedding, but the store keeps embedded domains.
        if finished:
            compute_mixture(method)
        return finished

    return Point(values, mixture, (run.run_dir, store), check, compute)
