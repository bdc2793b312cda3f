"""Which steps must not update the model: those whose loss or gradient is not finite, or a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_chameleon.options.guards import GuardOptions

LABELS = {"loss": "loss", "grad_norm": "gradient's norm"}


def accept_every_step(_grad_norm: float) -> bool:
    """What an optimizer does without a guard."""
    return True


class GuardedOptimizer(ChainedOptimizer):
    """megatron's optimizer, which asks before it updates the model.

    What it asks with is the gradient's norm that clipping needs on the host anyway. A refused step
    changes neither the weights nor the moments, and ``step`` returns False as its first value, as
    megatron does where a loss scale overflows.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        super().__init__(optimizer.chained_optimizers)
        self.accepts: Callable[[float], bool] = accept_every_step
        self._grad_norm = 0.0

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The global norm of the gradient, before clipping: the same on every rank.

        As megatron's, which counts one of several copies of a gradient; but a copy that is not
        finite, on whichever rank, makes the norm nan.
        """
        counted = [
            gradient
            for part in self.chained_optimizers
            for gradient in part.get_main_grads_for_grad_norm()
        ]
        uncounted = [
            parameter.grad
            for part in self.chained_optimizers
            for parameter in part.get_parameters()
            if parameter.grad is not None and not is_counted(parameter)
        ]
        self._grad_norm = float(
            get_grad_norm_fp32(
                with_copies(counted, uncounted),
                grad_stats_parallel_group=self.get_grad_stats_parallel_group(),
            )
        )
        return self._grad_norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the model, if the step is accepted; whether it was."""
        return self.accepts(self._grad_norm) and bool(super().step_with_ready_grads())


def is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether the gradient's norm counts this rank's gradient, as megatron does it.

    Of vectors that tensor-parallel ranks hold alike, the first one's are counted; of the tied
    embeddings, the first pipeline stage's.
    """
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def with_copies(
    counted: Sequence[torch.Tensor], uncounted: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients whose norm is that of ``counted``, to the bit, and nan if a copy is not finite.

    Nothing is reduced over ranks or read for it that is not for the norm: 0 is added to the
    smallest gradient, or what 0 times the copies' norm is otherwise.
    """
    if not uncounted:
        return list(counted)
    flag = 0.0 * torch.nn.utils.get_total_norm(uncounted)
    if not counted:
        return [flag.view(1)]
    smallest = min(range(len(counted)), key=lambda number: counted[number].numel())
    return [
        gradient + flag if number == smallest else gradient
        for number, gradient in enumerate(counted)
    ]


class RollingBound:
    """What is a spike among the last values: so many standard deviations above their mean.

    There is no bound before half the window is full. This is how OLMo 2 skips steps (OLMo et al.
    2024, "2 OLMo 2 Furious"), but that values beyond the bound do not move it.
    """

    def __init__(self, factor: float, window: int, values: Iterable[float] = ()) -> None:
        self._factor = factor
        self.values = deque(values, maxlen=window)

    def bound(self) -> float:
        """The largest value that is no spike; infinite where there is no bound."""
        enough = max(2, (self.values.maxlen or 0) // 2)
        if not self._factor or len(self.values) < enough:
            return math.inf
        return statistics.fmean(self.values) + self._factor * statistics.stdev(self.values)


class StepGuard:
    """Judges every step, and counts those that are skipped.

    All ranks make the same calls with the same numbers, and so come to the same verdicts.

    Attributes:
        skipped: steps skipped over the whole run.
        updates: steps of the whole run that were not skipped.
    """

    def __init__(self, options: GuardOptions, state: dict[str, Any]) -> None:
        factor, window = options.spike_factor, options.spike_window
        self._bounds = {name: RollingBound(factor, window, state.get(name, ())) for name in LABELS}
        self._phase: int | None = state.get("phase")
        self.skipped: int = state.get("skipped", 0)
        self.updates: int = state.get("updates", 0)

    def judge(self, loss: float | None, grad_norm: float, phase: int = 0) -> str | None:
        """Why the step has to be skipped, or None; counts it either way.

        Args:
            loss: mean over the step's tokens; None where none has a loss.
            grad_norm: before clipping.
            phase: the sample from which on the step's weights of the domains hold. Where they
                change, loss and norm move for good: what came before bounds nothing that follows.
        """
        if self._phase is not None and phase != self._phase:
            self._forget()
        self._phase = phase
        values = {"loss": loss, "grad_norm": grad_norm}
        measured = {name: value for name, value in values.items() if value is not None}
        objections = (self._objection(name, value) for name, value in measured.items())
        objection = next(filter(None, objections), None)
        if objection:
            self.skipped += 1
            return objection
        for name, value in measured.items():
            self._bounds[name].values.append(value)
        self.updates += 1
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that the run judges as if it had not been interrupted."""
        recent = {name: list(bound.values) for name, bound in self._bounds.items()}
        counts = {"skipped": self.skipped, "updates": self.updates}
        return {**counts, "phase": self._phase, **recent}

    def _forget(self) -> None:
        for bound in self._bounds.values():
            bound.values.clear()

    def _objection(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"the {LABELS[name]} is {value}"
        bound = self._bounds[name].bound()
        return f"the {LABELS[name]} is {value:.4g}, above {bound:.4g}" if value > bound else None
