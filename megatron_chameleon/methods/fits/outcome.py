"""What a fit found, told and written: the mixture, how good the fit is, how far it is stretched."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, MixtureWarning, provenance
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.methods.common.table import aligned, listed, share_of_tokens
from megatron_chameleon.methods.fits.runs import FittedRuns
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import FitQuality, Predict, Reach, reach_of
from megatron_chameleon.options.fits import FitOptions

MOST_METRICS = 40


@dataclasses.dataclass(frozen=True, eq=False)
class FoundMixture:
    """What a method hands over to be written.

    Attributes:
        method: its name.
        heading: the line above the table.
        weights: [k] before the limit of epochs.
        shares: [m] of the losses in the target.
        quality: of the fit, on runs that it had not seen.
        linear: of a linear fit, on the same.
        measured_by: how they were left out, in a word or two.
        predict: mixtures [n, k] -> losses [n, m].
        parameters: the method's own.
        told: lines of the method's own, under the table.
    """

    method: str
    heading: str
    weights: Array
    shares: Array
    quality: FitQuality
    linear: FitQuality
    measured_by: str
    predict: Predict
    parameters: dict[str, Any]
    told: tuple[str, ...] = ()


def write_found(
    found: FoundMixture, options: FitOptions, corpus: Corpus, fitted: FittedRuns, spent: Cost
) -> Mixture:
    """Write the mixture and print it, on one rank.

    Args:
        found: what the fit came to.
        options: what was asked for.
        corpus: whose domains are weighed.
        fitted: the runs behind it.
        spent: on the fit alone.
    """
    names = list(corpus.names)
    fields = limit_of(options, corpus, names).fields(found.weights)
    used = np.array([fields["weights"][name] for name in names])
    predicted = found.predict(used[None])[0]
    reach = reach_of(used, fitted.runs.mixtures)
    cost = fitted.cost + spent
    mixture = Mixture(
        method=found.method,
        parameters={
            **found.parameters,
            "target_shares": _named(fitted.runs.metrics, found.shares),
            "predicted_losses": _named(fitted.runs.metrics, predicted),
            "fit": quality_parameters(fitted.runs.metrics, found),
            "reach": _reach_parameters(reach, names, fitted.runs.keys),
            "made_from": [],
            "total_cost": {"flops": cost.flops, "device_seconds": cost.device_seconds},
            **fitted.parameters,
        },
        provenance=provenance(options, {"corpus": corpus.hash, **fitted.inputs}),
        cost=cost,
        **fields,
    )
    _warn_of_reach(reach, names, fitted.runs.keys)
    heading = f"{found.heading}\nfitted to {fitted.told}"
    write_and_tell(mixture, options, heading, *_closing(found, fitted, predicted, reach, mixture))
    return mixture


def _named(names: Sequence[str], values: Array) -> dict[str, float | None]:
    """JSON has no NaN: None."""
    return {
        name: None if math.isnan(value) else value
        for name, value in zip(names, values.tolist(), strict=True)
    }


def quality_parameters(metrics: Sequence[str], found: FoundMixture) -> dict[str, Any]:
    """The quality of the fit and of the linear one, for the mixture's file."""
    return {
        "measured_by": found.measured_by,
        "spearman": _named(metrics, found.quality.spearman),
        "mae": _named(metrics, found.quality.mae),
        "mae_of_a_constant": _named(metrics, found.quality.spread),
        "linear_spearman": _named(metrics, found.linear.spearman),
        "linear_mae": _named(metrics, found.linear.mae),
    }


def _reach_parameters(reach: Reach, names: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    return {
        "nearest_run": keys[reach.nearest],
        "distance": reach.distance,
        "usual_distance": reach.usual,
        "outside_range": [names[position] for position in reach.outside],
        "extrapolates": reach.extrapolates,
    }


def quality_table(metrics: Sequence[str], found: FoundMixture) -> list[str]:
    """A line for each loss: rank correlation and error of the fit, and those of a linear one."""
    headings = ["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]
    rows = [headings]
    for number in range(min(len(metrics), MOST_METRICS)):
        name = metrics[number] + ("*" if found.shares[number] else "")
        rows.append(
            [
                name,
                _correlation(found.quality.spearman[number]),
                f"{found.quality.mae[number]:.4f}",
                _correlation(found.linear.spearman[number]),
                f"{found.linear.mae[number]:.4f}",
                f"{found.quality.spread[number]:.4f}",
            ]
        )
    lines = aligned(rows)
    if len(metrics) > MOST_METRICS:
        lines.append(f"... and {len(metrics) - MOST_METRICS} more; the file has all of them")
    return lines


def _correlation(value: float) -> str:
    return "constant" if math.isnan(value) else f"{value:.3f}"


def _closing(
    found: FoundMixture, fitted: FittedRuns, predicted: Array, reach: Reach, mixture: Mixture
) -> list[str]:
    """The lines under the table."""
    mean = float(found.quality.mae @ found.shares)
    linear = float(found.linear.mae @ found.shares)
    constant = float(found.quality.spread @ found.shares)
    lines = [
        *found.told,
        f"the fit on runs that it had not seen ({found.measured_by}; * is the target):",
    ]
    lines += quality_table(fitted.runs.metrics, found)
    if mean >= constant:
        lines.append("the fit predicts no better than a constant: the mixture says nothing")
    elif mean > linear:
        lines.append("a linear fit predicts better: the mixture is uncertain; more runs may help")
    lines.append(
        f"predicted target {float(predicted @ found.shares):.4f}, best of the runs "
        f"{float((fitted.runs.losses @ found.shares).min()):.4f}; the nearest run, "
        f"{fitted.runs.keys[reach.nearest]}, has {share_of_tokens(reach.distance)} of its tokens "
        f"elsewhere ({share_of_tokens(reach.usual)} among the runs)"
    )
    cost = mixture.cost
    what = "the fit alone (of the runs it is unknown)" if not fitted.cost.wall_seconds else "all"
    lines.append(
        f"cost of {what}: {cost.flops:.2e} FLOPs, {cost.device_seconds:,.1f} device seconds"
    )
    return lines


def _warn_of_reach(reach: Reach, names: Sequence[str], keys: Sequence[str]) -> None:
    if not reach.extrapolates:
        return
    outside = [names[position] for position in reach.outside]
    where = f"; no run had so much or so little of {listed(outside)}" if outside else ""
    warnings.warn(
        f"the mixture is far from what was trained: {reach.distance:.0%} of the tokens of the "
        f"nearest run, {keys[reach.nearest]}, would come from elsewhere{where}; the predictions "
        "there are extrapolated",
        MixtureWarning,
        stacklevel=3,
    )
