"""Proxy runs of a method: train them, check their state, average the weights of their hook."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from megatron_chameleon.methods.output import epoch_limit, write_and_print
from megatron_chameleon.mixture.bootstrap import ONE_HOT
from megatron_chameleon.mixture.checks import Array
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
class FinishedProxy:
    """A finished proxy run, the hash of its weights, and the final state of its hook."""

    run: TrainingRun
    hash: str
    state: dict[str, Any]


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

    def saved_state(self, plan: TrainingPlan) -> dict[str, Any] | None:
        """The hook's state in the newest readable checkpoint, None without one. Writes nothing.

        Raises:
            UserError: if the folder holds a run of other options or another hook.
        """
        if not check_run_folder(plan):
            return None
        for folder in reversed(checkpoint_folders(self.options.run_dir)):
            try:
                record = CheckpointRecord.load(folder)
            except UserError:  # damaged: training reports it and resumes from the one before
                continue
            return self._state_in(record)
        return None

    @contextlib.contextmanager
    def folder_in_errors(self) -> Iterator[None]:
        """Prefix the UserErrors of the block with the run's folder."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.options.run_dir}: {error}") from None

    def finished(self) -> FinishedProxy:
        """The finished run.

        Raises:
            UserError: if it was trained with another hook.
        """
        run = TrainingRun.load(self.options.run_dir)
        record = CheckpointRecord.load(step_folder(run.root, run.step))
        return FinishedProxy(run, record.hash, self._state_in(record))

    def _state_in(self, record: CheckpointRecord) -> dict[str, Any]:
        if record.hook is not None and record.hook.name == self.hook.__name__:
            return record.hook.state
        other = f"the hook {record.hook.name}" if record.hook else "no hook"
        raise UserError(
            f"{self.options.run_dir} holds a run with {other}, not one of {self.method}; "
            f"{FRESH_START}"
        )


def require_same_rule(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError for the first parameter of the update rule that differs from the saved."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise UserError(
                f"the proxy was trained with another rule: {name} {saved.get(name)}, not {value}; "
                f"{FRESH_START}"
            )


def state_arrays(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """The arrays of a hook's saved state, float64, by name.

    Raises:
        UserError: for an array that is missing, of another shape than in ``shapes``, or not finite.
    """
    found = {}
    for name, shape in shapes.items():
        try:
            array = np.array(state.get(name), np.float64)
        except (TypeError, ValueError):  # ragged rows, or strings
            array = np.array(math.nan)
        if array.shape != shape or not np.isfinite(array).all():
            raise UserError(
                f"the checkpoint of the proxy is damaged: '{name}' must be "
                f"{' x '.join(map(str, shape))} finite numbers; {FRESH_START}"
            )
        found[name] = array
    return found


@dataclasses.dataclass(frozen=True)
class WeightPath:
    """How the domain weights moved during a run.

    Attributes:
        last: domain -> weight after the last step.
        mean: domain -> mean weight, the mixture.
        moved: sum over steps of the total-variation distance that they moved.
        steps: number of steps, without skipped ones.
    """

    last: Mapping[str, float]
    mean: Mapping[str, float]
    moved: float
    steps: int

    @property
    def last_from_mean(self) -> float:
        """Total-variation distance of the last weights from their mean."""
        return sum(abs(self.last[name] - self.mean[name]) for name in self.mean) / 2

    @property
    def moved_per_step(self) -> float:
        """Mean total-variation distance of a step."""
        return self.moved / max(self.steps, 1)

    def warn_unsettled(self, fix: str) -> None:
        """Warn if the weights collapsed onto a domain, or had not converged at the end.

        Args:
            fix: options to change, as the end of a sentence.
        """
        last, mean = self.last, self.mean
        heaviest = max(mean, key=lambda name: mean[name])
        if mean[heaviest] > ONE_HOT:
            warnings.warn(
                f"'{heaviest}' has {mean[heaviest]:.0%} of the weight, so the other domains are "
                f"hardly trained on; {fix}",
                MixtureWarning,
                stacklevel=2,
            )
        if self.last_from_mean > UNSETTLED_DISTANCE:
            moved = max(mean, key=lambda name: abs(last[name] - mean[name]))
            warnings.warn(
                f"the weights have not converged: the last ones are {self.last_from_mean:.2f} "
                f"(total variation) from their mean, '{moved}' {last[moved]:.3f} and not "
                f"{mean[moved]:.3f}; {fix}, or train for more steps",
                MixtureWarning,
                stacklevel=2,
            )

    def parameters(self, run: TrainingRun) -> dict[str, Any]:
        """The path in the form of a mixture's parameters, from the metrics that ``run`` logged."""
        hooks = [(line["step"], line.get("hook") or {}) for line in run.metrics()]
        logged = [
            (step, hook["weights"])
            for step, hook in hooks
            if _is_weights(hook.get("weights"), self.mean)
        ]
        stride = -(-len(logged) // MAX_TRAJECTORY_POINTS) or 1
        shown = logged[::-stride][::-1]  # includes the last step
        later = [weights for _step, weights in logged[len(logged) // 2 :]]
        return {
            "last_weights": dict(self.last),
            "last_from_mean": self.last_from_mean,
            "moved_per_step": self.moved_per_step,
            "range_in_second_half": {
                name: [min(w[name] for w in later), max(w[name] for w in later)]
                for name in self.mean
                if later
            },
            "trajectory": {
                "steps": [step for step, _weights in shown],
                "weights": {
                    name: [weights[name] for _step, weights in shown] for name in self.mean
                },
            },
        }

    def __str__(self) -> str:
        return (
            f"total variation: last weights {self.last_from_mean:.3f} from their mean, "
            f"{self.moved_per_step:.3f} per step"
        )


def _is_weights(logged: Any, names: Collection[str]) -> bool:
    """Whether a logged value has a number for each of ``names``; a damaged line may not."""
    return (
        isinstance(logged, dict)
        and logged.keys() == set(names)
        and all(isinstance(weight, float | int) for weight in logged.values())
    )


def write_mean_weights(
    path: WeightPath,
    runs: Sequence[TrainingRun],
    options: MethodOptions,
    corpus: Corpus,
    stopwatch: Stopwatch,
    *,
    method: str,
    settings: Mapping[str, Any],
    steps_averaged: int,
    scores: dict[str, float],
    inputs: Mapping[str, str],
    paper_flops: float,
    heading: str,
    closing: str,
) -> None:
    """Write the mean weights of a proxy to ``--output`` and print them. Called on one rank.

    Args:
        path: of the weights.
        runs: trained for the mixture, the proxy last.
        options: of the method.
        corpus: of the domains.
        stopwatch: started with the mixture's own cost; the runs record theirs.
        method: value of ``--method``.
        settings: the method's parameters.
        steps_averaged: number of weight vectors in the mean.
        scores: domain -> score.
        inputs: name -> hash of each artifact read besides the corpus.
        paper_flops: FLOPs by the formulas of Chameleon's tables.
        heading: the line above the table.
        closing: the last line under it.
    """
    own = stopwatch.cost(num_devices=runs[-1].cost.num_devices)
    total = own
    for run in runs:
        total += run.cost
    limit = epoch_limit(options, corpus, corpus.names)
    mixture = Mixture(
        **limit.mixture_fields(np.array(list(path.mean.values()))),
        method=method,
        parameters={
            **settings,
            **path.parameters(runs[-1]),
            "steps_averaged": steps_averaged,
            "made_from": [os.path.relpath(run.root, options.output.parent) for run in runs],
            "total_cost": {"flops": total.flops, "device_seconds": total.device_seconds},
            "paper_flops": paper_flops,
        },
        scores=scores,
        provenance=provenance(options, {"corpus": corpus.hash, **inputs}),
        cost=own,
    )
    write_and_print(mixture, options, heading, str(path), closing)
