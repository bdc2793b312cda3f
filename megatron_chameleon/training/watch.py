"""A hook in its place in the loop: what it is asked, when, and where it is written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_chameleon.artifacts.checkpoint import HookState
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.hooked_passes import HookedPasses
from megatron_chameleon.training.passes import Passes
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.resume import Progress
from megatron_chameleon.training.way_out import WayOut

MakeHook = Callable[[TrainingPlan, Layout], TrainingHook]


def make_hook(make: MakeHook | None, plan: TrainingPlan, layout: Layout) -> TrainingHook | None:
    """The hook of a run, as it is before the first step.

    Raises:
        UserError: if the hook changes the mixture and the run's order of samples does not allow it,
            or the options change it too.
    """
    hook = make(plan, layout) if make else None
    if hook is None or not hook.mixture_interval:
        return hook
    if plan.options.data.permutation == "megatron":
        raise UserError(
            f"{_name(hook)} changes the mixture, which Megatron's order of samples does not allow; "
            "give --permutation epoch"
        )
    if plan.options.data.mixture_change:
        raise UserError(
            f"{_name(hook)} changes the mixture by itself, and what --mixture-change plans would "
            "be lost; leave --mixture-change out"
        )
    return hook


def load_hook(hook: TrainingHook | None, progress: Progress, way_out: WayOut) -> None:
    """Take the hook of a run to where it was when the run's last checkpoint was written.

    Args:
        hook: of the run, as it is before the first step.
        progress: of the run.
        way_out: what to advise where they do not fit.

    Raises:
        UserError: if the checkpoint was watched by another hook.
    """
    if progress.checkpoint is None:
        return
    saved = progress.checkpoint.hook
    if (saved and saved.name) != (hook and _name(hook)):
        raise UserError(
            f"{progress.checkpoint.root} was written by a run of "
            f"{saved.name if saved else 'plain training'}, not of "
            f"{_name(hook) if hook else 'plain training'}; {way_out}"
        )
    if hook and saved:
        hook.load_state_dict(saved.state)


class Watch:
    """Asks a hook what it has to say of each step.

    Args:
        hook: which watches.
        passes: of the model that is trained.
        records: of the run; the hook's cost is added to its.
    """

    def __init__(self, hook: TrainingHook, passes: Passes, records: RunRecords) -> None:
        self._hook, self._passes, self._records = hook, passes, records
        self._hooked = HookedPasses(hook, passes, records.plan.shape, records.layout)
        self._flops_counted = hook.flops
        self._before_step: dict[str, Any] = {}

    def change_mixture(self, step: int) -> bool:
        """Let the hook change the mixture after ``step`` steps; whether it was asked.

        Before the step and not after the one before: a checkpoint in between has neither.
        """
        interval = self._hook.mixture_interval
        if not interval or not step or step % interval:
            return False
        weights = self._hook.new_mixture(step, self._passes.model)
        if weights is not None:
            self._records.samples.change_weights(self._records.samples_at(step), weights)
        return True

    def forward_backward(
        self, batches: Iterator[Batch], step: int, learning_rate: float
    ) -> torch.Tensor:
        """As :meth:`HookedPasses.forward_backward`; what the hook spends goes to the run's cost."""
        self._before_step = self._state()
        sums = self._hooked.forward_backward(batches, step, learning_rate)
        self._records.extra_flops += self._hook.flops - self._flops_counted
        self._flops_counted = self._hook.flops
        return sums

    def take_back(self) -> None:
        """Undo what the hook made of the last step, which did not update the model.

        The loss or gradient of such a step may be no number, and the hook's state with it.
        """
        self._hook.load_state_dict(self._before_step)

    def metrics(self) -> dict[str, Any]:
        """What the hook has for the log."""
        return self._hook.metrics()

    def state(self) -> HookState:
        """What a checkpoint keeps of the hook; later steps do not change it.

        Raises:
            UserError: on every rank, if the hook's state is not of JSON values.
        """
        return HookState(_name(self._hook), self._state())

    def _state(self) -> dict[str, Any]:
        """A copy of the hook's state, as a continued run would read it."""
        state = self._hook.state_dict()
        try:
            copy: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{_name(self._hook)}.state_dict() gives what a checkpoint cannot hold ({error}); "
                "give finite numbers, texts, lists and dictionaries"
            ) from error
        return copy


def _name(hook: TrainingHook) -> str:
    return type(hook).__name__
