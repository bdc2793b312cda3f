"""Skip steps whose loss or gradient norm is NaN, infinite or a spike; stop after too many."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.metrics import finite
from megatron_chameleon.training.options import GuardOptions
from megatron_chameleon.training.step import counts_losses
from megatron_chameleon.training.stopping import REASONS, SIGNAL_NAMES

LABELS = {"loss": "loss", "grad_norm": "gradient's norm"}


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that did not update the model.

    Attributes:
        step: step number, from 1.
        reason: why it was skipped.
        domain_samples: domain -> samples in the global batch, without zeros.
        domain_loss: domain -> mean loss of its tokens.
    """

    step: int
    reason: str
    domain_samples: dict[str, int]
    domain_loss: dict[str, float]

    def __str__(self) -> str:
        return f"step {self.step} skipped: {self.reason}; {_worst_losses([self])}"


class StepGuard:
    """Decide which steps to skip, and keep count of them.

    All ranks make the same calls with the same numbers, and so reach the same decisions.

    Args:
        options: when a step is skipped.
        state: result of :meth:`state` in the checkpoint to resume from; empty for a new run.

    Attributes:
        skipped: skipped steps over the whole run.
        updates: steps over the whole run that were not skipped.
        streak: the consecutive skipped steps up to the last step.
        unlogged: steps skipped since the last log.
        reason: why the last step was skipped, or None.
    """

    def __init__(self, options: GuardOptions, state: dict[str, Any]) -> None:
        self._options = options
        window = options.spike_window
        self._windows = {name: deque(state.get(name, ()), maxlen=window) for name in LABELS}
        self._phase: int | None = state.get("phase")  # older checkpoints lack it
        self.skipped: int = state.get("skipped", 0)
        self.updates: int = state.get("updates", 0)
        self.streak = [_restored(step) for step in state.get("streak", ())]
        self.unlogged: list[SkippedStep] = []
        self.reason: str | None = None

    def accepts(self, loss: float | None, grad_norm: float, phase: int = 0) -> bool:
        """Whether the step may update the model; counts the step either way.

        Args:
            loss: mean over the step's tokens; None if none has a loss.
            grad_norm: gradient norm before clipping.
            phase: first sample of the current mixture phase. A new phase empties the windows, since
                loss and norm shift with the mixture.
        """
        if self._phase is not None and phase != self._phase:
            for window in self._windows.values():
                window.clear()
        self._phase, self.reason = phase, None
        values = {"loss": loss, "grad_norm": grad_norm}
        measured = {name: value for name, value in values.items() if value is not None}
        for name, value in measured.items():
            limit = self._spike_threshold(name)
            if not math.isfinite(value):
                self.reason = f"the {LABELS[name]} is {value}"
            elif value > limit:
                self.reason = f"the {LABELS[name]} is {value:.4g}, above {limit:.4g}"
            if self.reason:
                self.skipped += 1
                return False
        for name, value in measured.items():
            self._windows[name].append(value)
        self.updates += 1
        self.streak = []
        return True

    def _spike_threshold(self, name: str) -> float:
        """Standard deviations above the mean of the window; infinite until half of it is full.

        OLMo 2 skips steps this way (OLMo et al. 2024, "2 OLMo 2 Furious"), except that here spikes
        do not enter the window.
        """
        values, factor = self._windows[name], self._options.spike_factor
        if not factor or len(values) < max(2, self._options.spike_window // 2):
            return math.inf
        return statistics.fmean(values) + factor * statistics.stdev(values)

    def record(self, step: SkippedStep) -> None:
        """Record a step that was not accepted."""
        self.streak.append(step)
        self.unlogged.append(step)

    def gives_up(self, *, is_last_step: bool) -> bool:
        """Whether to stop: the streak reached its limit, or no step of the run was accepted."""
        limit = self._options.max_consecutive_skipped_steps
        return bool(self.streak) and (
            len(self.streak) >= limit or (is_last_step and not self.updates)
        )

    def give_up_message(self, checkpoint: str | None) -> str:
        """Error message for a run that stops.

        Args:
            checkpoint: the last checkpoint before the streak, if any.
        """
        first, last = self.streak[0], self.streak[-1]
        return (
            f"{len(self.streak)} steps in a row were skipped, {first.step} to {last.step}, the "
            f"last because {last.reason}; their samples: {_worst_losses(self.streak)}; last "
            f"checkpoint before them: {checkpoint or 'none'}; start a new run with a lower --lr, a "
            "longer --lr-warmup-iters, or without the text of these domains (--mixture)"
        )

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values; a resumed run makes the same decisions."""
        return {
            "skipped": self.skipped,
            "updates": self.updates,
            "phase": self._phase,
            **{name: list(window) for name, window in self._windows.items()},
            "streak": finite([dataclasses.asdict(step) for step in self.streak]),
        }


def _restored(step: dict[str, Any]) -> SkippedStep:
    """A skipped step from a checkpoint, which holds null for losses that are not finite."""
    losses = {n: math.nan if x is None else x for n, x in step["domain_loss"].items()}
    return SkippedStep(**{**step, "domain_loss": losses})


def _worst_losses(steps: Sequence[SkippedStep]) -> str:
    """'news (12 samples, loss nan), code (4 samples, loss 3.1)', NaN and highest loss first."""
    samples: Counter[str] = Counter()
    worst: dict[str, float] = {}
    for step in steps:
        samples.update(step.domain_samples)
        for name, loss in step.domain_loss.items():
            worst[name] = max(worst.get(name, -math.inf), loss, key=_nan_is_largest)
    ranked = sorted(samples, key=lambda name: -_nan_is_largest(worst.get(name, -math.inf)))
    return ", ".join(  # without a loss if all tokens are masked
        f"{name} ({samples[name]} samples, "
        + (f"loss {worst[name]:.4g})" if name in worst else "no loss)")
        for name in ranked
    )


def _nan_is_largest(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


class StepSync:
    """All-reduce of loss and stop flags, without an extra device synchronization.

    Call :meth:`send`, then compute the gradient norm, which synchronizes, then read the results.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        on_gpu = layout.device.type == "cuda"
        # Pinned memory makes the copy asynchronous.
        self._host = torch.zeros(2 + len(REASONS), dtype=torch.float64, pin_memory=on_gpu)

    def send(self, domain_sums: torch.Tensor, stop_flags: Sequence[float]) -> None:
        """Start the all-reduce of this rank's values.

        Args:
            domain_sums: [k, 3] float64 on the device, as in :class:`StepResult`.
            stop_flags: for each of ``REASONS``, positive if this rank has it.
        """
        losses = domain_sums if counts_losses(self._layout) else torch.zeros_like(domain_sums)
        mine = torch.cat([losses[:, :2].sum(0), self._on_device(stop_flags)])
        dist.all_reduce(mine)
        self._host.copy_(mine, non_blocking=True)

    def loss(self) -> float | None:
        """Mean loss of the step's tokens; None if none has a loss. Valid after the norm."""
        loss, tokens = self._host[:2].tolist()
        return loss / tokens if tokens else None

    def stop_reasons(self) -> list[str]:
        """The ``REASONS`` that any rank has. Valid after the norm."""
        flags = self._host[2:].tolist()
        return [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]

    def signals(self, stop_flags: Sequence[float]) -> list[str]:
        """Names of the signals that any rank has received. Blocking; every rank calls this.

        The time limit is ignored here, so that each start of a run makes at least one step.
        """
        mine = self._on_device(stop_flags[: len(SIGNAL_NAMES)])
        dist.all_reduce(mine)
        return [name for name, flag in zip(SIGNAL_NAMES, mine.tolist(), strict=True) if flag]

    def _on_device(self, flags: Sequence[float]) -> torch.Tensor:
        """The flags as a tensor, filled by kernels: a host-to-device copy would synchronize."""
        tensor = torch.zeros(len(flags), dtype=torch.float64, device=self._layout.device)
        for number, flag in enumerate(flags):
            if flag:
                tensor[number : number + 1].fill_(flag)
        return tensor
