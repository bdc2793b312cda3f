"""Proxy runs of a method: train them, check their state, average the weights of their hook."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, TrainingRun, provenance
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.limits import epoch_limit
from megatron_chameleon.methods.online import options as online_options
from megatron_chameleon.methods.options import ProxyMethodOptions, ProxyOptions
from megatron_chameleon.methods.output import ONE_HOT, by_name, cost_totals, warn, write_and_print
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doge import DogeState
from megatron_chameleon.mixture.doremi import DoremiState
from megatron_chameleon.model.config import name_of
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.parallel.options import ParallelOptions, is_rank_0
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.hook import HookFactory, TrainingHook, load_hook
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan, plan_training
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trainer import pretrain

# Name of the proxy's run folder in --work-dir.
PROXY = "proxy"
# Warn if the total-variation distance between the last and the mean weights exceeds this value.
UNSETTLED_DISTANCE = 0.25
MAX_TRAJECTORY_POINTS = 50
T = TypeVar("T")
State = TypeVar("State", DogeState, DoremiState)
Options = TypeVar("Options", bound=ProxyMethodOptions)


def training_options(
    proxy: ProxyOptions, corpus: Path, run_dir: Path, mixture: str = "uniform"
) -> PretrainOptions:
    """Return the options of a proxy's training run; ``mixture`` is a value of ``--mixture``."""
    fields = {field.name: getattr(proxy, field.name) for field in dataclasses.fields(ProxyOptions)}
    return online_options.PretrainOptions(run_dir=run_dir, corpus=corpus, mixture=mixture, **fields)


def forward_only(options: ParallelOptions) -> ParallelOptions:
    """Return the parallelism for evaluation, which excludes interleaved pipeline stages."""
    names = [field.name for field in dataclasses.fields(ParallelOptions)]
    return ParallelOptions(**{name: getattr(options, name) for name in names})


def on_rank_0(options: ParallelOptions, make: Callable[[], T]) -> T:
    """Create process groups, call ``make`` on rank 0 and return its result on every rank.

    Args:
        options: parallelism of the method's training runs.
        make: a function whose result can be pickled.

    Raises:
        UserError: on every rank, if ``make`` raises it.
    """
    with distributed(forward_only(options), seed=0):
        return from_main(make)


def train_proxy(
    options: PretrainOptions,
    stops: StopRequests,
    make_hook: HookFactory | None = None,
    *,
    name: str = "the proxy",
) -> bool:
    """Train the run of ``options``, or resume it. Called on every rank.

    Args:
        options: training options of the run.
        stops: stop-signal handler, active while training.
        make_hook: constructs the training hook of the method, if it has one.
        name: name of the run in messages.

    Returns:
        Whether the run is finished; False after a stop signal.

    Raises:
        UserError: the errors of :func:`pretrain`, prefixed with ``name``.
    """
    if is_rank_0():
        print(f"\n{name}: {options.run_dir}")
    try:
        with stops:  # without the handler, a stop signal would end the process
            pretrain(options, hook_factory=make_hook, stops=stops)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    return on_rank_0(options.parallel, lambda: is_finished(options.run_dir))


def is_finished(run_dir: Path) -> bool:
    """Return whether the run exists and has reached its last step."""
    return TrainingRun.exists(run_dir) and TrainingRun.load(run_dir).status == "finished"


class MeanWeightsHook(TrainingHook, Generic[State]):
    """Base class of hooks that weight a proxy's domains; the mixture is the mean of the weights.

    Args:
        names: the k domains of the corpus.
        weighted: positions of the domains that get a weight.
        state: initial state of the weights.
        settings: JSON values that the state depends on, in addition to the options of the run.
    """

    def __init__(
        self, names: Sequence[str], weighted: Sequence[int], state: State, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.names, self.weighted, self.settings = list(names), list(weighted), settings
        self.state: State = state

    def of_domains(self, weights: Array) -> dict[str, float]:
        """Map each domain to its weight; domains that are not in ``weighted`` get 0."""
        every = np.zeros(len(self.names))
        every[self.weighted] = weights
        return by_name(self.names, every)

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and the summed distance of all updates."""
        return {
            "weights": self.of_domains(self.state.weights),
            "mean_weights": self.of_domains(self.state.mean),
            "moved": self.state.moved,
        }

    def state_dict(self) -> dict[str, Any]:
        """The settings and the state, as JSON values."""
        state = vars(self.state)
        arrays = {k: v.tolist() for k, v in state.items() if isinstance(v, np.ndarray)}
        return {**self.settings, **state, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Raises UserError if it is damaged, or is from other settings."""
        before = {**state.get("rule", {}), **state}
        for name, value in {**self.settings["rule"], **self.settings}.items():
            if name != "rule" and before.get(name) != value:
                raise UserError(
                    f"the proxy was trained with {name} {before.get(name)}, not {value}; "
                    f"{FRESH_START}"
                )
        shapes = {k: v.shape for k, v in vars(self.state).items() if isinstance(v, np.ndarray)}
        try:
            arrays = {name: np.array(state[name], np.float64) for name in shapes}
            if not all(np.isfinite(v).all() and v.shape == shapes[k] for k, v in arrays.items()):
                raise ValueError
            self.state = dataclasses.replace(
                self.state, **arrays, counted=state["counted"], moved=state["moved"]
            )
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"the state of the proxy's hook is damaged: expected finite numbers of shapes "
                f"{shapes}; {FRESH_START}"
            ) from None


class ProxyMethod(abc.ABC, Generic[Options, State]):
    """Base class of methods whose mixture is the mean of the weights in a proxy's training hook.

    The constructor validates the options and the files that they name, and trains nothing. The
    constructor of a subclass calls :meth:`check_proxy`.

    Args:
        options: options of the method.
        trained_on: folder of the proxy's corpus, if it is not ``--corpus``; it has the same domains
            to train on.

    Attributes:
        options: options of the method.
        corpus: corpus whose domains are weighed.
        work_dir: folder of the runs.
        run: training options of the proxy.
        plan: training plan of the proxy.
        step: step of the proxy's run whose mean weights are the mixture; None for the last step.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    step: int | None = None

    def __init__(self, options: Options, trained_on: Path | None = None) -> None:
        self.options, self.corpus = options, Corpus.load(options.corpus)
        check_output(options.output, Mixture.KIND)
        self.work_dir = options.runs_folder
        self.run = training_options(
            options.proxy, trained_on or options.corpus, self.work_dir / PROXY
        )
        self.plan = plan_training(self.run)

    @classmethod
    def compute(
        cls, options: Options, stops: StopRequests | None = None, step: int | None = None
    ) -> bool:
        """Train the runs that are not finished, and write the mixture. Called on every rank.

        Args:
            options: options of the method.
            stops: stop-signal handler; created for this call if None.
            step: step of the proxy's run, which has kept its checkpoint, that the mixture is for;
                None for the last step.

        Returns:
            Whether the mixture was written; False after a stop signal.

        Raises:
            UserError: for a mistake in the options or in the files that they name, before any
                training; later, for errors of the training.
        """
        stops = stops or StopRequests(options.proxy.stopping)
        parallel, proxy = options.proxy.parallel, f"{cls.title}'s proxy"
        method = on_rank_0(parallel, lambda: cls(options))
        if not options.fallback.accept_uncertain and on_rank_0(parallel, method.needs_no_proxy):
            return True
        if not method.prepare(stops) or not train_proxy(
            method.run, stops, method.make_hook, name=proxy
        ):
            return False
        method.step = step
        on_rank_0(parallel, method.write_mixture)
        return True

    @property
    def runs(self) -> Sequence[Path]:
        """Folders of the runs that the method trains."""
        return [self.run.run_dir]

    def needs_no_proxy(self) -> bool:
        """Write the prior if no gain over it is certain; return whether it was written."""
        # MixMin's module, which predicts the gain, imports this one.
        from megatron_chameleon.methods.predicted_gain import write_prior_without_gain

        return write_prior_without_gain(
            self.name, self.options, self.runs, None, self.options.corpus
        )

    def prepare(self, stops: StopRequests) -> bool:
        """Train the runs that the proxy needs; False after a stop signal. Called on every rank."""
        return True

    @abc.abstractmethod
    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> MeanWeightsHook[State]:
        """Construct the hook of the proxy's run; ``layout`` is None if only its state is read."""

    @abc.abstractmethod
    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""

    def check_proxy(self) -> None:
        """Check the run in the proxy's folder, and the hook's state in its newest checkpoint.

        Raises:
            UserError: if the run has other options or another hook.
        """
        if not check_run_folder(self.plan):
            return
        for folder in reversed(checkpoint_folders(self.run.run_dir)):
            try:
                record = CheckpointRecord.load(folder)
            except UserError:
                # Training will report the damage and resume from an older checkpoint.
                continue
            try:
                self.load_hook(record)
            except UserError as error:
                raise UserError(f"{self.run.run_dir}: {error}") from None
            return

    def finished(self) -> tuple[TrainingRun, MeanWeightsHook[State], dict[str, str]]:
        """Return the finished run, its hook, and the checkpoint's hash for the provenance.

        If the mixture is for an earlier step, the run has that number of steps and tokens, but the
        cost of all steps, which were trained.

        Raises:
            UserError: if the run was trained with another hook.
        """
        run = TrainingRun.load(self.run.run_dir)
        step = run.step if self.step is None else self.step
        record = CheckpointRecord.load(step_folder(run.root, step))
        run = dataclasses.replace(run, step=step, tokens=sum(record.domain_tokens.values()))
        return run, self.load_hook(record), {"proxy": record.hash}

    def load_hook(self, record: CheckpointRecord) -> MeanWeightsHook[State]:
        """Return the hook, with its state loaded from a checkpoint.

        Raises:
            UserError: if another hook or other settings produced the state.
        """
        hook = self.make_hook(self.plan, None)
        load_hook(hook, record)
        return hook

    def write_mean_weights(
        self,
        hook: MeanWeightsHook[State],
        steps: int,
        runs: Sequence[TrainingRun],
        *,
        settings: Mapping[str, Any],
        scores: Array,
        inputs: Mapping[str, str],
        paper_flops: float,
        heading: str,
        hint: str,
    ) -> None:
        """Write the mean weights to ``--output`` and print them. Called on one rank.

        Warns if nearly all weight is on one domain, or the weights had not converged at the end.

        Args:
            hook: the proxy's hook, in its final state.
            steps: number of steps, without skipped steps.
            runs: runs trained for the mixture, the proxy last.
            settings: parameters of the method, for the mixture file.
            scores: [k] score of each domain.
            inputs: name -> hash of each artifact read besides the corpus.
            paper_flops: FLOPs, counted as in the tables of the Chameleon paper.
            heading: the line above the table.
            hint: end of each warning: the options that the user should change.
        """
        stopwatch, options, names = Stopwatch(), self.options, self.corpus.names
        last, mean = hook.of_domains(hook.state.weights), hook.of_domains(hook.state.mean)
        changes = {name: abs(last[name] - mean[name]) for name in names}
        last_from_mean, per_step = sum(changes.values()) / 2, hook.state.moved / max(steps, 1)
        heaviest, farthest = max(names, key=mean.__getitem__), max(names, key=changes.__getitem__)
        if mean[heaviest] > ONE_HOT:
            warn(
                f"'{heaviest}' has {mean[heaviest]:.0%} of the weight, so the other domains are "
                f"hardly trained on; {hint}"
            )
        if last_from_mean > UNSETTLED_DISTANCE:
            warn(
                "the weights have not converged: the total-variation distance of the last weights "
                f"from the mean weights is {last_from_mean:.2f} ('{farthest}': "
                f"{last[farthest]:.3f}, mean {mean[farthest]:.3f}); {hint}, or train for more steps"
            )
        logged = {
            line["step"]: line["hook"]["weights"]
            for line in runs[-1].metrics()
            if line["step"] <= runs[-1].step and "weights" in (line.get("hook") or {})
        }
        later = list(logged.values())[len(logged) // 2 :]
        stride = -(-len(logged) // MAX_TRAJECTORY_POINTS) or 1
        shown = list(logged)[::-stride][::-1]  # counted backwards, to include the last step
        own = stopwatch.cost(num_devices=runs[-1].cost.num_devices)
        size = {
            "model": name_of(self.plan.config),
            "train_iters": self.run.train_iters,
            "step": runs[-1].step,
        }
        limit, weights = epoch_limit(options, self.corpus, names), np.array(list(mean.values()))
        mixture = Mixture(
            **limit.mixture_fields(weights, limit.apply(weights)),
            method=self.name,
            parameters={
                **settings,
                "proxy": size,
                "target_tokens": self.run.target_tokens,
                "last_weights": last,
                "last_from_mean": last_from_mean,
                "moved_per_step": per_step,
                "range_in_second_half": {
                    name: [min(w[name] for w in later), max(w[name] for w in later)]
                    for name in names
                    if later
                },
                "trajectory": {
                    "steps": shown,
                    "weights": {name: [logged[step][name] for step in shown] for name in names},
                },
                "steps_averaged": hook.state.counted,
                "made_from": [os.path.relpath(run.root, options.output.parent) for run in runs],
                "total_cost": cost_totals(sum((run.cost for run in runs), own)),
                "paper_flops": paper_flops,
            },
            scores=by_name(names, scores),
            provenance=provenance(options, {"corpus": self.corpus.hash, **inputs}),
            cost=own,
        )
        write_and_print(
            mixture,
            options,
            self.corpus,
            heading,
            f"total-variation distance: {last_from_mean:.3f} between the last and the mean "
            f"weights; {per_step:.3f} between consecutive steps, on average",
            *(f"cost of {run.root}: {run.cost.flops:.2e} FLOPs" for run in runs),
        )
