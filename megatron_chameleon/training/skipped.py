"""Which domains the samples of skipped steps came from, and what is said of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence


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

    def record(self) -> dict[str, object]:
        """The same for metrics.jsonl, where what is not finite is null."""
        return dataclasses.asdict(self)


def streak_message(streak: Sequence[SkippedStep], last_checkpoint: str | None) -> str:
    """What is said where a run gives up after the steps of ``streak``."""
    first, last = streak[0], streak[-1]
    saved = f"the last checkpoint before them is {last_checkpoint}"
    return (
        f"{len(streak)} steps in a row were skipped, {first.step} to {last.step}, the last because "
        f"{last.reason}; their samples come from {_domains(streak)}; "
        f"{saved if last_checkpoint else 'there is no checkpoint before them'}; lower --lr or "
        "lengthen --lr-warmup-iters in a new run, or look at these domains and draw others from "
        f"step {first.step - 1} on (--mixture-change)"
    )


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
