"""Whether weights that move during a run have come to rest: what a person is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import MixtureWarning, TrainingRun
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.exponentiated import total_variation
from megatron_chameleon.mixture.precision import ONE_HOT

# Beyond this total-variation distance the last weights are told to be others than their mean.
FAR = 0.25
# Of the weights at the log intervals, about so many are kept in the mixture.
MOST_POINTS = 50


def warn_of_unsettled(names: Sequence[str], last: Array, mean: Array, way_out: str) -> None:
    """Warn of weights that another run, or a longer one, would hardly give again.

    Args:
        names: of the domains.
        last: [k] the weights after the last step.
        mean: [k] the mean over all steps, which is the mixture.
        way_out: which knobs to turn, to end a sentence.
    """
    heaviest = int(mean.argmax())
    if len(names) > 1 and mean[heaviest] > ONE_HOT:
        warnings.warn(
            f"'{names[heaviest]}' has {mean[heaviest]:.0%} of the weight, so the others are hardly "
            f"trained on; {way_out}",
            MixtureWarning,
            stacklevel=2,
        )
    if (distance := total_variation(last, mean)) > FAR:
        moved = int(np.abs(last - mean).argmax())
        warnings.warn(
            f"the last weights are {distance:.2f} (total variation) from their mean, "
            f"'{names[moved]}' {last[moved]:.3f} and not {mean[moved]:.3f}: they have not settled; "
            f"{way_out}, or more steps",
            MixtureWarning,
            stacklevel=2,
        )


def steadiness(
    last: Mapping[str, float], mean: Mapping[str, float], run: TrainingRun
) -> dict[str, Any]:
    """How far the weights moved while they were found, for the parameters of a mixture.

    Args:
        last: domain -> its weight after the last step.
        mean: domain -> its mean weight, which is the mixture.
        run: that found them; its hook logs them as ``weights``.
    """
    logged = [(line["step"], line["hook"]["weights"]) for line in run.metrics() if "hook" in line]
    stride = -(-len(logged) // MOST_POINTS) or 1
    shown = logged[::-stride][::-1]  # from the end backwards, so that the last step is among them
    later = [weights for _step, weights in logged[len(logged) // 2 :]]
    return {
        "last_weights": dict(last),
        "last_from_mean": sum(abs(last[name] - mean[name]) for name in mean) / 2,
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
