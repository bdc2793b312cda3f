"""Proxy runs of a method: train them, check their state, average the weights of their hook."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_chameleon.artifacts import (
    Corpus,
    Mixture,
    MixtureWarning,
    Stopwatch,
    TrainingRun,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.options import MethodOptions, ProxyOptions
from megatron_chameleon.methods.output import cost_totals, epoch_limit, write_and_print
from megatron_chameleon.mixture.bootstrap import ONE_HOT
from megatron_chameleon.mixture.doge import DogeState
from megatron_chameleon.mixture.doremi import DoremiState
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.hook import HookFactory, TrainingHook
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trainer import pretrain

# The proxy's folder in --work-dir.
PROXY = "proxy"
# Total-variation distance between the last and the mean weights above which a warning is issued.
UNSETTLED_DISTANCE = 0.25
MAX_TRAJECTORY_POINTS = 50
State = TypeVar("State", DogeState, DoremiState)


def resolve_work_dir(output: Path, work_dir: Path | None) -> Path:
    """``--work-dir``, by default the path of the mixture without .json.

    Raises:
        UserError: if there is no default since ``output`` does not end with .json.
    """
    if work_dir is not None:
        return work_dir
    if output.suffix != ".json":
        raise UserError(f"--output {output}: must end with .json")
    return output.with_suffix("")


def training_options(
    proxy: ProxyOptions, corpus: Path, run_dir: Path, mixture: str = "uniform"
) -> PretrainOptions:
    """The options of a proxy's run; ``mixture`` is a value of ``--mixture``."""
    fields = {field.name: getattr(proxy, field.name) for field in dataclasses.fields(ProxyOptions)}
    return PretrainOptions(run_dir=run_dir, corpus=corpus, mixture=mixture, **fields)


def forward_only(options: ParallelOptions) -> ParallelOptions:
    """The parallelism of a model that is only evaluated: without interleaved pipeline stages."""
    names = [field.name for field in dataclasses.fields(ParallelOptions)]
    return ParallelOptions(**{name: getattr(options, name) for name in names})


def train_proxy(
    options: PretrainOptions,
    stops: StopRequests,
    make_hook: HookFactory | None = None,
    *,
    name: str = "the proxy",
) -> bool:
    """Train the run of ``options``, or resume it. Called on every rank.

    Args:
        options: of the run.
        stops: stop-signal handler, active while training.
        make_hook: constructs the training hook of the method, if it has one.
        name: of the run in messages.

    Returns:
        Whether the run is finished; False after a stop signal.

    Raises:
        UserError: as :func:`pretrain`, with the name of the run.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{name}: {options.run_dir}")
    try:
        with stops:  # otherwise a signal ends the process
            pretrain(options, hook_factory=make_hook, stops=stops)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    with distributed(forward_only(options.parallel), seed=0):
        return from_main(lambda: is_finished(options.run_dir))


def is_finished(run_dir: Path) -> bool:
    """Whether the run exists and has reached its last step."""
    return TrainingRun.exists(run_dir) and TrainingRun.load(run_dir).status == "finished"


@dataclasses.dataclass(frozen=True)
class HookedProxy:
    """A proxy run with the training hook of a method.

    Attributes:
        method: its name for messages.
        hook: type of the hook.
        options: of the run.
    """

    method: str
    hook: type[TrainingHook]
    options: PretrainOptions

    def check_saved(self, plan: TrainingPlan, parse: Callable[[dict[str, Any]], object]) -> None:
        """Parse the hook's state in the newest readable checkpoint, if there is one.

        Raises:
            UserError: if the folder holds a run of other options or another hook, and errors of
                ``parse``, with the folder.
        """
        if not check_run_folder(plan):
            return
        for folder in reversed(checkpoint_folders(self.options.run_dir)):
            try:
                record = CheckpointRecord.load(folder)
            except UserError:  # damaged: training reports it and resumes from the one before
                continue
            try:
                parse(self._state_in(record))
            except UserError as error:
                raise UserError(f"{self.options.run_dir}: {error}") from None
            return

    def finished(self) -> tuple[TrainingRun, str, dict[str, Any]]:
        """The finished run, the hash of its weights, and the final state of its hook.

        Raises:
            UserError: if it was trained with another hook.
        """
        run = TrainingRun.load(self.options.run_dir)
        record = CheckpointRecord.load(step_folder(run.root, run.step))
        return run, record.hash, self._state_in(record)

    def _state_in(self, record: CheckpointRecord) -> dict[str, Any]:
        if record.hook is not None and record.hook.name == self.hook.__name__:
            return record.hook.state
        other = f"the hook {record.hook.name}" if record.hook else "no hook"
        raise UserError(
            f"the proxy was trained with {other}, not one of {self.method}; {FRESH_START}"
        )


def _are_weights(logged: Any, names: Collection[str]) -> bool:
    """Whether a logged value is a number for each of ``names``; a damaged line may not be."""
    return (
        isinstance(logged, dict)
        and logged.keys() == set(names)
        and all(isinstance(weight, float | int) for weight in logged.values())
    )


def save_state(state: DogeState | DoremiState, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A hook's state as JSON values, after the ``settings`` that produced it."""
    values = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(state).items()}
    return {**settings, **values}


def load_state(saved: Mapping[str, Any], first: State, settings: Mapping[str, Any]) -> State:
    """The state in the result of :func:`save_state`.

    Args:
        saved: from a checkpoint.
        first: the initial state.
        settings: those of this run.

    Raises:
        UserError: if ``saved`` was produced by other settings, or is damaged.
    """
    before = {**saved["rule"], **saved}
    for name, value in {**settings["rule"], **settings}.items():
        if name != "rule" and before.get(name) != value:
            raise UserError(
                f"the proxy was trained with {name} {before.get(name)}, not {value}; {FRESH_START}"
            )
    arrays = {}
    for name, value in vars(first).items():
        if isinstance(value, np.ndarray):
            try:
                arrays[name] = np.array(saved[name], np.float64)
                damaged = arrays[name].shape != value.shape or not np.isfinite(arrays[name]).all()
            except (KeyError, TypeError, ValueError):  # ragged rows, or strings
                damaged = True
            if damaged:
                raise UserError(
                    f"the checkpoint of the proxy is damaged: '{name}' must be "
                    f"{' x '.join(map(str, value.shape))} finite numbers; {FRESH_START}"
                )
    return dataclasses.replace(first, **arrays, counted=saved["counted"], moved=saved["moved"])


@dataclasses.dataclass(frozen=True)
class WeightPath:
    """How the domain weights moved during a run.

    Attributes:
        last: domain -> weight after the last step.
        mean: domain -> mean weight, the mixture.
        moved: sum over steps of the total-variation distance that they moved.
        steps: number of steps, without skipped ones.
        averaged: number of weight vectors in the mean.
    """

    last: Mapping[str, float]
    mean: Mapping[str, float]
    moved: float
    steps: int
    averaged: int


def write_mean_weights(
    path: WeightPath,
    runs: Sequence[TrainingRun],
    options: MethodOptions,
    corpus: Corpus,
    stopwatch: Stopwatch,
    *,
    method: str,
    settings: Mapping[str, Any],
    scores: dict[str, float],
    inputs: Mapping[str, str],
    paper_flops: float,
    heading: str,
    fix_unsettled: str,
) -> None:
    """Write the mean weights of a proxy to ``--output`` and print them. Called on one rank.

    Warns if the weights collapsed onto a domain, or had not converged at the end.

    Args:
        path: of the weights.
        runs: trained for the mixture, the proxy last.
        options: of the method.
        corpus: of the domains.
        stopwatch: started with the mixture's own cost; the runs record theirs.
        method: value of ``--method``.
        settings: the method's parameters.
        scores: domain -> score.
        inputs: name -> hash of each artifact read besides the corpus.
        paper_flops: FLOPs by the formulas of Chameleon's tables.
        heading: the line above the table.
        fix_unsettled: options to change in a warning.
    """
    last, mean = path.last, path.mean
    changes = {name: abs(last[name] - mean[name]) for name in mean}
    last_from_mean, per_step = sum(changes.values()) / 2, path.moved / max(path.steps, 1)
    heaviest, farthest = max(mean, key=lambda n: mean[n]), max(mean, key=lambda n: changes[n])
    if mean[heaviest] > ONE_HOT:
        warnings.warn(
            f"'{heaviest}' has {mean[heaviest]:.0%} of the weight, so the other domains are hardly "
            f"trained on; {fix_unsettled}",
            MixtureWarning,
            stacklevel=2,
        )
    if last_from_mean > UNSETTLED_DISTANCE:
        warnings.warn(
            f"the weights have not converged: the last ones are {last_from_mean:.2f} (total "
            f"variation) from their mean, '{farthest}' {last[farthest]:.3f} and not "
            f"{mean[farthest]:.3f}; {fix_unsettled}, or train for more steps",
            MixtureWarning,
            stacklevel=2,
        )
    logged = [
        (line["step"], line["hook"]["weights"])
        for line in runs[-1].metrics()
        if _are_weights((line.get("hook") or {}).get("weights"), mean)
    ]
    stride = -(-len(logged) // MAX_TRAJECTORY_POINTS) or 1
    shown = logged[::-stride][::-1]  # includes the last step
    later = [weights for _step, weights in logged[len(logged) // 2 :]]
    own = stopwatch.cost(num_devices=runs[-1].cost.num_devices)
    total = sum((run.cost for run in runs), own)
    limit = epoch_limit(options, corpus, corpus.names)
    mixture = Mixture(
        **limit.mixture_fields(np.array(list(mean.values()))),
        method=method,
        parameters={
            **settings,
            "last_weights": dict(last),
            "last_from_mean": last_from_mean,
            "moved_per_step": per_step,
            "range_in_second_half": {
                name: [min(w[name] for w in later), max(w[name] for w in later)]
                for name in mean
                if later
            },
            "trajectory": {
                "steps": [step for step, _weights in shown],
                "weights": {name: [weights[name] for _step, weights in shown] for name in mean},
            },
            "steps_averaged": path.averaged,
            "made_from": [os.path.relpath(run.root, options.output.parent) for run in runs],
            "total_cost": cost_totals(total),
            "paper_flops": paper_flops,
        },
        scores=scores,
        provenance=provenance(options, {"corpus": corpus.hash, **inputs}),
        cost=own,
    )
    write_and_print(
        mixture,
        options,
        heading,
        f"total variation: last weights {last_from_mean:.3f} from their mean, {per_step:.3f} per "
        "step",
        *(f"cost of {run.root}: {run.cost.flops:.2e} FLOPs" for run in runs),
    )
