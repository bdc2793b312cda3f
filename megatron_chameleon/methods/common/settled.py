"""Whether weights that move during a run have come to rest: what a person is warned of."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from megatron_chameleon.artifacts import MixtureWarning, TrainingRun
from megatron_chameleon.mixture.precision import ONE_HOT

# Beyond this total-variation distance the last weights are told to be others than their mean.
FAR = 0.25
# Of the weights at the log intervals, about so many are kept in the mixture.
MOST_POINTS = 50


@dataclasses.dataclass(frozen=True)
class WeightPath:
    """How weights moved during a run.

    Attributes:
        last: domain -> its weight after the last step.
        mean: domain -> its mean weight, which is the mixture.
        moved: sum over steps of the total-variation distance that they moved.
        steps: how many those were; one that was skipped moves nothing and is none of them.
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
        """Mean distance that a step moved them."""
        return self.moved / max(self.steps, 1)


def warn_of_unsettled(path: WeightPath, way_out: str) -> None:
    """Warn of weights that another run, or a longer one, would hardly give again.

    Args:
        path: of the weights.
        way_out: which knobs to turn, to end a sentence.
    """
    last, mean = path.last, path.mean
    heaviest = max(mean, key=lambda name: mean[name])
    if mean[heaviest] > ONE_HOT:
        warnings.warn(
            f"'{heaviest}' has {mean[heaviest]:.0%} of the weight, so the others are hardly "
            f"trained on; {way_out}",
            MixtureWarning,
            stacklevel=2,
        )
    if path.last_from_mean > FAR:
        moved = max(mean, key=lambda name: abs(last[name] - mean[name]))
        warnings.warn(
            f"the last weights are {path.last_from_mean:.2f} (total variation) from their mean, "
            f"'{moved}' {last[moved]:.3f} and not {mean[moved]:.3f}: they have not settled; "
            f"{way_out}, or more steps",
            MixtureWarning,
            stacklevel=2,
        )


def steadiness(path: WeightPath, run: TrainingRun) -> dict[str, Any]:
    """How far the weights moved while they were found, for the parameters of a mixture.

    Args:
        path: of the weights.
        run: that found them; its hook logs them as ``weights``.
    """
    mean = path.mean
    hooks = [(line["step"], line.get("hook") or {}) for line in run.metrics()]
    logged = [
        (step, hook["weights"]) for step, hook in hooks if _are_weights(hook.get("weights"), mean)
    ]
    stride = -(-len(logged) // MOST_POINTS) or 1
    shown = logged[::-stride][::-1]  # from the end backwards, so that the last step is among them
    later = [weights for _step, weights in logged[len(logged) // 2 :]]
    return {
        "last_weights": dict(path.last),
        "last_from_mean": path.last_from_mean,
        "moved_per_step": path.moved_per_step,
        "range_in_second_half": {
            name: [min(w[name] for w in later), max(w[name] for w in later)]
            for name in mean
            if later
        },
        "trajectory": {
            "steps": [step for step, _weights in shown],
            "weights": {name: [weights[name] for _step, weights in shown] for name in mean},
        },
    }


def _are_weights(logged: Any, names: Collection[str]) -> bool:
    """Whether ``logged`` holds a number for each of ``names``; a damaged line may hold anything."""
    return (
        isinstance(logged, dict)
        and logged.keys() == set(names)
        and all(isinstance(weight, float | int) for weight in logged.values())
    )
