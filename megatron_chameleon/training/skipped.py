"""Which domains the samples of skipped steps came from, and what is said of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_chameleon.options.data import Permutation
from megatron_chameleon.training.way_out import BY_FLAGS, WayOut


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that did not update the model.

    Attributes:
        step: its number; the first is 1.
        reason: what was wrong.
        domain_samples: domain -> samples of the global batch; those without any are left out.
        domain_loss: domain -> mean loss of its tokens.
    """

    step: int
    reason: str
    domain_samples: dict[str, int]
    domain_loss: dict[str, float]

    def line(self) -> str:
        """One line a person can read."""
        return f"step {self.step} skipped: {self.reason}; {_domains([self])}"

    def record(self) -> dict[str, Any]:
        """The same for metrics.jsonl, where what is not finite is null."""
        return dataclasses.asdict(self)

    def saved(self) -> dict[str, Any]:
        """The same for a checkpoint, as JSON values: a loss that is not finite is null."""
        losses = {name: _finite(loss) for name, loss in self.domain_loss.items()}
        return {**dataclasses.asdict(self), "domain_loss": losses}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> SkippedStep:
        """What :meth:`saved` gave, its losses NaN where they were not finite."""
        losses = {n: math.nan if x is None else x for n, x in saved["domain_loss"].items()}
        return cls(**{**saved, "domain_loss": losses})


def streak_message(
    streak: Sequence[SkippedStep],
    checkpoint: str | None,
    permutation: Permutation,
    *,
    is_newest: bool = True,
    hook_mixes: bool = False,
    way_out: WayOut = BY_FLAGS,
) -> str:
    """What is said where a run gives up after the steps of ``streak``.

    Args:
        streak: steps skipped in a row.
        checkpoint: the last one from before them, if there is one.
        permutation: what the run's samples are ordered by.
        is_newest: whether the run goes on from that checkpoint, and not from one among the steps.
        hook_mixes: whether a hook decides on the mixture.
        way_out: how the command that trains begins a new run.
    """
    first, last = streak[0], streak[-1]
    saved = f"the last checkpoint before them is {checkpoint}"
    if not is_newest:
        saved += " (to go on from there, write its name into the file 'latest' beside it)"
    draws = f"and draw others {_other_draws(first.step - 1, permutation, hook_mixes)}"
    if not way_out.draws_by_flags:
        draws = f"and mend their text; for a new run {way_out}"
    return (
        f"{len(streak)} steps in a row were skipped, {first.step} to {last.step}, the last because "
        f"{last.reason}; their samples come from {_domains(streak)}; "
        f"{saved if checkpoint else 'there is no checkpoint before them'}; lower --lr or lengthen "
        f"--lr-warmup-iters in a new run, or look at these domains {draws}"
    )


def _other_draws(step: int, permutation: Permutation, hook_mixes: bool) -> str:
    """How other domains are drawn from ``step`` on, or from the start where the run cannot."""
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
    """Larger is worse; what is no number is worst."""
    if loss is None:
        return -math.inf
    return math.inf if math.isnan(loss) else loss
