"""The way of every method that trains nothing: corpus in, weights out, on the first rank alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, Stopwatch, provenance
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.methods.common.check_text import check_text
from megatron_chameleon.methods.common.chosen import chosen_domains
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.options.mixture import ChosenDomainsOptions


@dataclasses.dataclass(frozen=True)
class Assigned:
    """Weights that a method has found, before any limit of epochs.

    Attributes:
        weights: [k] float64, summing to 1, in the order of the domains it was given.
        heading: what the weights are, for the line above the table.
        parameters: the method's settings, for the mixture.
        inputs: name of each artifact read, the corpus apart -> its hash.
        closing: lines under the table.
        paper_flops: FLOPs to find the weights as Chameleon's tables print them; None where these
            say nothing of it.
        inherited: what the weights had cost in all before they were given; None if it is unknown,
            or if they were found here.
    """

    weights: Array
    heading: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    closing: Sequence[str] = ()
    paper_flops: float | None = None
    inherited: Cost | None = None


def write_model_free(
    method: str,
    options: ChosenDomainsOptions,
    assign: Callable[[Corpus, list[str]], Assigned],
) -> None:
    """Write and tell the mixture that ``assign`` finds. Every rank may call this.

    No process groups are made, since nothing is shared: ranks other than the first just leave.

    Args:
        method: its name.
        options: what was asked for.
        assign: from the corpus and the domains that are weighed to their weights.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    check_output(options.output, KIND)
    stopwatch = Stopwatch()
    corpus = Corpus.load(options.corpus)
    names = chosen_domains(options.domains, corpus)
    limit = limit_of(options, corpus, names)
    limit.check()
    assigned = assign(corpus, names)
    fields = limit.fields(assigned.weights)
    weighted = [name for name, weight in fields["weights"].items() if weight > 0]
    check_text(corpus, weighted, "to draw")
    cost = stopwatch.cost()
    mixture = Mixture(
        **fields,
        method=method,
        parameters={**assigned.parameters, **_costs(assigned, cost)},
        provenance=provenance(options, {"corpus": corpus.hash, **assigned.inputs}),
        cost=cost,
    )
    write_and_tell(mixture, options, assigned.heading, *assigned.closing)


def _costs(assigned: Assigned, own: Cost) -> dict[str, Any]:
    """What is known of the cost beside the mixture's own, for its parameters."""
    costs: dict[str, Any] = {}
    if assigned.inherited is not None:
        total = assigned.inherited + own
        costs["total_cost"] = {"flops": total.flops, "device_seconds": total.device_seconds}
    if assigned.paper_flops is not None:
        costs["paper_flops"] = assigned.paper_flops
    return costs
