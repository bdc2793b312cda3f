"""Skip steps whose loss or gradient norm is NaN, infinite or a spike, or stop the run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.options import GuardOptions
from megatron_chameleon.training.step import counts_losses
from megatron_chameleon.training.stopping import REASONS, SIGNAL_NAMES

LABELS = {"loss": "loss", "grad_norm": "gradient's norm"}


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that did not update the model.

    Attributes:
        step: step number, from 1.
        reason: why the step was skipped.
        domain_samples: domain -> samples in the global batch, without zeros.
        domain_loss: domain -> mean loss of its tokens.
    """

    step: int
    reason: str
    domain_samples: dict[str, int]
    domain_loss: dict[str, float]

    def __str__(self) -> str:
        losses = {name: f"{loss:.4g}" for name, loss in self.domain_loss.items()}
        domains = (
            f"{name} ({count} samples, loss {losses.get(name, 'none')})"
            for name, count in self.domain_samples.items()
        )
        return f"step {self.step} skipped: {self.reason}; {', '.join(domains)}"


class StepGuard:
    """Decide which steps to skip, and count the skipped steps.

    All ranks make the same calls with the same numbers, and so reach the same decisions.

    Args:
        options: thresholds for skipping a step and for stopping the run.

    Attributes:
        skipped: number of skipped steps over the whole run.
        updates: number of steps over the whole run that were not skipped.
        streak: step numbers of the consecutive skipped steps up to the last step.
        unlogged: steps skipped since the last log, which empties the list.
    """

    def __init__(self, options: GuardOptions) -> None:
        self._options = options
        self.unlogged: list[SkippedStep] = []
        self.load_state_dict({})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`; an empty one is that of a new run."""
        window = self._options.spike_window
        self._windows = {name: deque(state.get(name, ()), maxlen=window) for name in LABELS}
        self._phase: int | None = state.get("phase")
        self.skipped: int = state.get("skipped", 0)
        self.updates: int = state.get("updates", 0)
        self.streak: list[int] = list(state.get("streak", ()))

    def check(self, loss: float | None, grad_norm: float, phase: int = 0) -> str | None:
        """Count the step; return why it must not update the model, or None if it may.

        Args:
            loss: mean loss of the step's tokens; None if no token has a loss.
            grad_norm: gradient norm before clipping.
            phase: first sample of the current mixture phase. A new phase empties the windows, since
                loss and norm shift with the mixture.
        """
        if self._phase is not None and phase != self._phase:
            for window in self._windows.values():
                window.clear()
        self._phase = phase
        values = {"loss": loss, "grad_norm": grad_norm}
        measured = {name: value for name, value in values.items() if value is not None}
        for name, value in measured.items():
            limit = self._spike_threshold(name)
            if not math.isfinite(value):
                self.skipped += 1
                return f"the {LABELS[name]} is {value}"
            if value > limit:
                self.skipped += 1
                return f"the {LABELS[name]} is {value:.4g}, above {limit:.4g}"
        for name, value in measured.items():
            self._windows[name].append(value)
        self.updates += 1
        self.streak = []
        return None

    def _spike_threshold(self, name: str) -> float:
        """Largest value that is not a spike: the mean plus --spike-factor standard deviations.

        The threshold is infinite until the window is half full. OLMo 2 skips steps in the same way
        (OLMo et al. 2024, "2 OLMo 2 Furious"), except that here spikes do not enter the window.
        """
        values, factor = self._windows[name], self._options.spike_factor
        if not factor or len(values) < max(2, self._options.spike_window // 2):
            return math.inf
        return statistics.fmean(values) + factor * statistics.stdev(values)

    def record(self, step: SkippedStep, *, is_last_step: bool) -> bool:
        """Record a step that :meth:`check` rejected; return whether to stop the run.

        The run stops if the streak has reached its limit, or after the last step if no step of the
        run was accepted.
        """
        self.streak.append(step.step)
        self.unlogged.append(step)
        is_over = len(self.streak) >= self._options.max_consecutive_skipped_steps
        return is_over or (is_last_step and not self.updates)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values.

        A resumed run with this state makes the same decisions as an uninterrupted run.
        """
        return {
            "skipped": self.skipped,
            "updates": self.updates,
            "phase": self._phase,
            **{name: list(window) for name, window in self._windows.items()},
            "streak": list(self.streak),
        }


class StepSync:
    """All-reduce of losses and stop flags, without an extra device synchronization.

    Call :meth:`send`, then compute the gradient norm, which synchronizes, then read the results.

    Args:
        layout: layout of the ranks.
        num_domains: number of domains (k).
    """

    def __init__(self, layout: Layout, num_domains: int) -> None:
        self._layout, self._num_domains = layout, num_domains
        on_gpu = layout.device.type == "cuda"
        size = 2 * num_domains + len(REASONS)
        # Pinned memory makes the copy asynchronous.
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=on_gpu)

    def send(self, domain_sums: torch.Tensor, stop_flags: Sequence[float]) -> None:
        """Start the all-reduce of this rank's losses and stop flags.

        Args:
            domain_sums: [k, 3] float64 on the device, as in :class:`StepResult`.
            stop_flags: result of :meth:`StopRequests.flags`.
        """
        losses = domain_sums if counts_losses(self._layout) else torch.zeros_like(domain_sums)
        mine = torch.cat([losses[:, :2].T.flatten(), self._on_device(stop_flags)])
        dist.all_reduce(mine)
        self._host.copy_(mine, non_blocking=True)

    def loss(self) -> float | None:
        """Mean loss of the step's tokens; None if no token has a loss.

        Call this method after computing the gradient norm.
        """
        loss, tokens = self.domain_losses().sum(1).tolist()
        return loss / tokens if tokens else None

    def domain_losses(self) -> npt.NDArray[np.float64]:
        """Summed loss and number of tokens with a loss of each domain, over all ranks: [2, k].

        Call this method after computing the gradient norm.
        """
        return self._host[: 2 * self._num_domains].view(2, -1).numpy().copy()

    def stop_reasons(self) -> list[str]:
        """``REASONS`` for which at least one rank wants to stop.

        Call this method after computing the gradient norm.
        """
        flags = self._host[2 * self._num_domains :].tolist()
        return [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]

    def signals(self, stop_flags: Sequence[float]) -> list[str]:
        """Names of the stop signals that any rank has received. Collective; waits for the device.

        The time limit is ignored here, so that every command makes at least one step.
        """
        mine = self._on_device(stop_flags[: len(SIGNAL_NAMES)])
        dist.all_reduce(mine)
        return [name for name, flag in zip(SIGNAL_NAMES, mine.tolist(), strict=True) if flag]

    def _on_device(self, flags: Sequence[float]) -> torch.Tensor:
        """The flags as a tensor on the device.

        Kernels fill the tensor, since a host-to-device copy would synchronize.
        """
        tensor = torch.zeros(len(flags), dtype=torch.float64, device=self._layout.device)
        for number, flag in enumerate(flags):
            if flag:
                tensor[number : number + 1].fill_(flag)
        return tensor
