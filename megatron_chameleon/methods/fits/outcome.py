"""What a fit found, told and written: the mixture, how good the fit is, how far it is stretched."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, MixtureWarning, provenance
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.methods.common.table import listed, share_of_tokens
from megatron_chameleon.methods.fits.judgement import Judgement, by_name, lines_of, parameters_of
from megatron_chameleon.methods.fits.runs import FittedRuns
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict, Reach, reach_of
from megatron_chameleon.options.fits import FitOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """What a method has made of runs.

    Attributes:
        heading: the line above the table.
        weights: [k] the mixture that it thinks best, before the limit of epochs.
        predict: mixtures [n, k] -> losses [n, m].
        refit: fits mixtures [n, k] and losses [n, m] of some of the runs in the same way, and calls
            its last argument after each of the m fits.
        parameters: the method's own.
        remedy: what may help where the fit is poor.
        told: lines of the method's own, under the table.
    """

    heading: str
    weights: Array
    predict: Predict
    refit: Callable[[Array, Array, Callable[[], object]], Predict]
    parameters: dict[str, Any]
    remedy: str
    told: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class FoundMixture:
    """A fit with what it is worth, to be written.

    Attributes:
        method: its name.
        fitted: to the runs.
        shares: [m] of the losses in the target.
        judgement: of the fit, on runs that it had not seen.
    """

    method: str
    fitted: Fitted
    shares: Array
    judgement: Judgement


def write_found(
    found: FoundMixture, options: FitOptions, corpus: Corpus, given: FittedRuns, spent: Cost
) -> Mixture:
    """Write the mixture and print it, on one rank.

    Args:
        found: what the fit came to.
        options: what was asked for.
        corpus: whose domains are weighed.
        given: the runs behind it.
        spent: on the fit alone.
    """
    names, runs = list(corpus.names), given.runs
    fields = limit_of(options, corpus, names).fields(found.fitted.weights)
    used = np.array([fields["weights"][name] for name in names])
    predicted = found.fitted.predict(used[None])[0]
    reach = reach_of(used, runs.mixtures)
    mixture = Mixture(
        method=found.method,
        parameters={
            **found.fitted.parameters,
            "target_shares": by_name(runs.metrics, found.shares),
            "predicted_losses": by_name(runs.metrics, predicted),
            "fit": parameters_of(runs.metrics, found.judgement),
            "reach": _reach_parameters(reach, names, runs.keys),
            **_cost_parameters(options, given, given.cost + spent),
            **given.parameters,
        },
        provenance=provenance(options, {"corpus": corpus.hash, **given.inputs}),
        cost=spent,
        **fields,
    )
    _warn_of_reach(reach, names, runs.keys)
    heading = f"{found.fitted.heading}\nfitted to {given.told}"
    write_and_tell(mixture, options, heading, *_closing(found, given, predicted, reach, spent))
    return mixture


def _cost_parameters(options: FitOptions, given: FittedRuns, total: Cost) -> dict[str, Any]:
    """What a ledger needs; a sum only where all of its parts are known."""
    folder = options.output.parent
    costs: dict[str, Any] = {
        "made_from": [os.path.relpath(swarm, folder) for swarm in given.made_from]
    }
    if given.paper_flops is not None:
        costs["paper_flops"] = given.paper_flops
    if given.unknown_costs:
        return {**costs, "unknown_costs": list(given.unknown_costs)}
    sums = {"flops": total.flops, "device_seconds": total.device_seconds}
    return {**costs, "total_cost": sums}


def _reach_parameters(reach: Reach, names: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    return {
        "nearest_run": keys[reach.nearest],
        "distance": reach.distance,
        "usual_distance": reach.usual,
        "outside_range": [names[position] for position in reach.outside],
        "extrapolates": reach.extrapolates,
    }


def _closing(
    found: FoundMixture, given: FittedRuns, predicted: Array, reach: Reach, spent: Cost
) -> list[str]:
    """The lines under the table."""
    runs, fitted = given.runs, found.fitted
    lines = [
        *fitted.told,
        *lines_of(runs.metrics, found.shares, found.judgement, fitted.remedy),
    ]
    lines.append(
        f"predicted target {float(predicted @ found.shares):.4f}, best of the runs "
        f"{float((runs.losses @ found.shares).min()):.4f}; the nearest run, "
        f"{runs.keys[reach.nearest]}, has {share_of_tokens(reach.distance)} of its tokens "
        f"elsewhere ({share_of_tokens(reach.usual)} among the runs)"
    )
    if given.unknown_costs:
        cost, what = spent, f"the fit alone (unknown: {listed(list(given.unknown_costs))})"
    else:
        cost, what = given.cost + spent, "all"
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
