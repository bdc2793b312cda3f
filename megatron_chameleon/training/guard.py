"""Skip steps whose loss or gradient is NaN, infinite or a spike; count and report them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.metrics import IntervalMeter
from megatron_chameleon.training.options import GuardOptions
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.step import StepResult, counts_losses
from megatron_chameleon.training.stopping import REASONS, SIGNAL_NAMES

LABELS = {"loss": "loss", "grad_norm": "gradient's norm"}


class RollingBound:
    """Spike threshold: ``factor`` standard deviations above the mean of a window of values.

    Infinite until half the window is full. OLMo 2 skips steps this way (OLMo et al. 2024, "2 OLMo 2
    Furious"), except that here values above the bound do not enter the window.
    """

    def __init__(self, factor: float, window: int, values: Iterable[float] = ()) -> None:
        self._factor = factor
        self.values = deque(values, maxlen=window)

    def bound(self) -> float:
        """The largest value that is not a spike; infinite if there is no bound."""
        enough = max(2, (self.values.maxlen or 0) // 2)
        if not self._factor or len(self.values) < enough:
            return math.inf
        return statistics.fmean(self.values) + self._factor * statistics.stdev(self.values)


class StepGuard:
    """Decide which steps to skip, and count them.

    All ranks make the same calls with the same numbers, and so reach the same decisions.

    Attributes:
        skipped: skipped steps over the whole run.
        updates: steps over the whole run that were not skipped.
    """

    def __init__(self, options: GuardOptions, state: dict[str, Any]) -> None:
        factor, window = options.spike_factor, options.spike_window
        self._bounds = {name: RollingBound(factor, window, state.get(name, ())) for name in LABELS}
        self._phase: int | None = state.get("phase")
        self.skipped: int = state.get("skipped", 0)
        self.updates: int = state.get("updates", 0)

    def judge(self, loss: float | None, grad_norm: float, phase: int = 0) -> str | None:
        """The reason to skip the step, or None; counts the step either way.

        Args:
            loss: mean over the step's tokens; None if none has a loss.
            grad_norm: gradient norm before clipping.
            phase: first sample of the current mixture phase. A new phase resets the bounds, since
                loss and norm shift with the mixture.
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
        """State for a checkpoint; a resumed run makes the same decisions."""
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


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that did not update the model.

    Attributes:
        step: step number, from 1.
        reason: why it was skipped.
        domain_samples: domain -> samples in the global batch, where there are any.
        domain_loss: domain -> mean loss of its tokens.
    """

    step: int
    reason: str
    domain_samples: dict[str, int]
    domain_loss: dict[str, float]

    def line(self) -> str:
        """One line for the terminal."""
        return f"step {self.step} skipped: {self.reason}; {_domains([self])}"

    def record(self) -> dict[str, Any]:
        """A record for metrics.jsonl, which writes null for numbers that are not finite."""
        return dataclasses.asdict(self)

    def saved(self) -> dict[str, Any]:
        """JSON values for a checkpoint: null for a loss that is not finite."""
        losses = {name: _finite(loss) for name, loss in self.domain_loss.items()}
        return {**dataclasses.asdict(self), "domain_loss": losses}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> SkippedStep:
        """Restore the result of :meth:`saved`, with NaN for null losses."""
        losses = {n: math.nan if x is None else x for n, x in saved["domain_loss"].items()}
        return cls(**{**saved, "domain_loss": losses})


def streak_message(
    streak: Sequence[SkippedStep],
    checkpoint: str | None,
    permutation: Permutation,
    *,
    is_newest: bool = True,
    hook_mixes: bool = False,
) -> str:
    """Error message for a run that stops after too many consecutive skipped steps.

    Args:
        streak: the consecutive skipped steps.
        checkpoint: the last checkpoint before them, if any.
        permutation: the run's ``--permutation``.
        is_newest: whether the run would resume from that checkpoint, not from a later one.
        hook_mixes: whether a hook sets the mixture.
    """
    first, last = streak[0], streak[-1]
    saved = f"the last checkpoint before them is {checkpoint}"
    if not is_newest:
        saved += " (to go on from there, write its name into the file 'latest' beside it)"
    return (
        f"{len(streak)} steps in a row were skipped, {first.step} to {last.step}, the last because "
        f"{last.reason}; their samples come from {_domains(streak)}; "
        f"{saved if checkpoint else 'there is no checkpoint before them'}; lower --lr or lengthen "
        f"--lr-warmup-iters in a new run, fix the text of these domains, or sample others "
        f"{_other_mixture(first.step - 1, permutation, hook_mixes)}"
    )


def _other_mixture(step: int, permutation: Permutation, hook_mixes: bool) -> str:
    """How to change the mixture from ``step`` on, or in a new run if this one cannot."""
    if hook_mixes or not step:
        return "in a new run (--mixture)"
    if permutation == "megatron":
        return (
            "in a new run: from the start (--mixture), or from this step on (--permutation epoch "
            f"--mixture-change {step}=MIXTURE)"
        )
    return f"from step {step} on (--mixture-change {step}=MIXTURE)"


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _domains(steps: Sequence[SkippedStep]) -> str:
    """'news (12 samples, loss nan), code (4 samples, loss 3.1)': the worst loss of each."""
    samples: Counter[str] = Counter()
    worst: dict[str, float] = {}
    for step in steps:
        samples.update(step.domain_samples)
        for name, loss in step.domain_loss.items():
            worst[name] = max(worst.get(name, -math.inf), loss, key=_badness)
    return ", ".join(
        f"{name} ({count} samples, loss {worst.get(name, math.nan):.4g})"
        for name, count in sorted(samples.items(), key=lambda item: -_badness(worst.get(item[0])))
    )


def _badness(loss: float | None) -> float:
    """Sort key: larger is worse, NaN is worst."""
    if loss is None:
        return -math.inf
    return math.inf if math.isnan(loss) else loss


class SkippedSteps:
    """Apply the guard to each step, and record the skipped ones.

    Args:
        records: records of the run.
        meter: computes a step's losses per domain.
        state: result of :meth:`state` in the checkpoint that is resumed; empty for a new run.
        hook_mixes: whether a hook sets the mixture.

    Attributes:
        streak: consecutive skipped steps up to the last step.
    """

    def __init__(
        self,
        records: RunRecords,
        meter: IntervalMeter,
        state: dict[str, Any],
        *,
        hook_mixes: bool = False,
    ) -> None:
        self._records, self._meter, self._hook_mixes = records, meter, hook_mixes
        self._options = records.plan.options
        self._guard = StepGuard(self._options.guards, state)
        self._objection: str | None = None
        self._since_log: list[SkippedStep] = []
        # Older checkpoints do not have it.
        self.streak = [SkippedStep.restored(step) for step in state.get("streak", ())]

    @property
    def count(self) -> int:
        """Skipped steps over the whole run."""
        return self._guard.skipped

    @property
    def updates(self) -> int:
        """Steps of the whole run that were not skipped."""
        return self._guard.updates

    def accepts(self, step: int, loss: float | None, grad_norm: float) -> bool:
        """Whether the current step may update the model.

        Args:
            step: steps done before it.
            loss: mean over its tokens; None if none has a loss.
            grad_norm: gradient norm before clipping.
        """
        schedule = self._records.samples.schedule
        phase = schedule.phases[schedule.phase_at(self._records.samples_at(step))]
        self._objection = self._guard.judge(loss, grad_norm, phase.first_sample)
        return self._objection is None

    def note(self, step: int, result: StepResult) -> None:
        """Record step number ``step`` if it was skipped; every rank calls this."""
        if not result.skipped:
            self.streak = []
            return
        assert self._objection is not None
        skipped = SkippedStep(
            step,
            self._objection,
            self._records.domain_samples(step),
            self._meter.domain_losses(result.domain_sums),
        )
        self.streak.append(skipped)
        self._since_log.append(skipped)
        if self._records.layout.is_main:
            print(skipped.line())

    def too_many(self, *, is_last: bool) -> bool:
        """Whether to fail: the streak reached its limit, or no step updated the model."""
        limit = self._options.guards.max_consecutive_skipped_steps
        return bool(self.streak) and (len(self.streak) >= limit or (is_last and not self.updates))

    def error(self) -> UserError:
        """The error to raise after too many skipped steps."""
        before = self._records.last_checkpoint(before_step=self.streak[0].step)
        return UserError(
            streak_message(
                self.streak,
                before,
                self._options.data.permutation,
                is_newest=before == self._records.last_checkpoint(),
                hook_mixes=self._hook_mixes,
            )
        )

    def since_log(self) -> list[SkippedStep]:
        """Return the steps skipped since the last call."""
        skipped, self._since_log = self._since_log, []
        return skipped

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {**self._guard.state(), "streak": [step.saved() for step in self.streak]}


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

    def signals(self, stop_flags: Sequence[float]) -> list[str]:
        """Names in ``SIGNAL_NAMES`` that any rank has received. Blocking; every rank calls this.

        The time limit is ignored here, so that each start of a run makes at least one step.
        """
        mine = self._on_device(stop_flags[: len(SIGNAL_NAMES)])
        dist.all_reduce(mine)
        return [name for name, flag in zip(SIGNAL_NAMES, mine.tolist(), strict=True) if flag]

    def loss(self) -> float | None:
        """Mean loss of the step's tokens; None if none has a loss.

        Valid only after the device was synchronized since :meth:`send`.
        """
        loss, tokens = self._host[:2].tolist()
        return loss / tokens if tokens else None

    def stop_reasons(self) -> list[str]:
        """The ``REASONS`` that any rank has; valid only after a device synchronization."""
        flags = self._host[2:].tolist()
        return [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]

    def _on_device(self, flags: Sequence[float]) -> torch.Tensor:
        """The flags as a tensor, filled by kernels: a host-to-device copy would synchronize."""
        tensor = torch.zeros(len(flags), dtype=torch.float64, device=self._layout.device)
        for number, flag in enumerate(flags):
            if flag:
                tensor[number : number + 1].fill_(flag)
        return tensor
