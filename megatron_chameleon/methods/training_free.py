"""Training-free methods: weights that follow from the corpus or from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, Stopwatch, provenance
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.methods.limits import epoch_limit
from megatron_chameleon.methods.options import ChosenDomainsOptions
from megatron_chameleon.methods.output import (
    cost_totals,
    require_training_tokens,
    select_domains,
    write_and_print,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.parallel.options import is_rank_0


@dataclasses.dataclass(frozen=True)
class AssignedWeights:
    """Weights of a training-free method, before the epoch limit.

    Attributes:
        weights: [k] float64, summing to 1, in the order of the selected domains.
        heading: the line above the table.
        parameters: the method's settings, for the mixture.
        inputs: name -> hash of each artifact read besides the corpus.
        closing: lines under the table.
        paper_flops: FLOPs, counted as in the tables of the Chameleon paper; None if the paper's
            formulas do not cover the method.
        inherited: total cost of weights computed elsewhere, if known.
        token_budget: tokens of the target run, if the weights are amounts of text.
    """

    weights: Array
    heading: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    closing: Sequence[str] = ()
    paper_flops: float | None = None
    inherited: Cost | None = None
    token_budget: int | None = None


def run_training_free(
    method: str,
    options: ChosenDomainsOptions,
    assign: Callable[[Corpus, list[str]], AssignedWeights],
) -> None:
    """Run a training-free method on rank 0; no process groups are created.

    Args:
        method: name of the method.
        options: options of the method.
        assign: function from the corpus and the names of the selected domains to their weights.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    if not is_rank_0():
        return
    check_output(options.output, Mixture.KIND)
    stopwatch = Stopwatch()
    corpus = Corpus.load(options.corpus)
    names = select_domains(options.domains, corpus.names, corpus.root, held_out=corpus.held_out)
    epoch_limit(options, corpus, names).check()
    assigned = assign(corpus, names)
    limit = epoch_limit(options, corpus, names, assigned.token_budget)
    fields = limit.mixture_fields(assigned.weights, limit.apply(assigned.weights))
    weighted = [name for name, weight in fields["weights"].items() if weight > 0]
    require_training_tokens(corpus, weighted, "to sample")
    cost, parameters = stopwatch.cost(), dict(assigned.parameters)
    if assigned.inherited is not None:
        parameters["total_cost"] = cost_totals(assigned.inherited + cost)
    if assigned.paper_flops is not None:
        parameters["paper_flops"] = assigned.paper_flops
    mixture = Mixture(
        **fields,
        method=method,
        parameters=parameters,
        provenance=provenance(options, {"corpus": corpus.hash, **assigned.inputs}),
        cost=cost,
    )
    write_and_print(mixture, options, corpus, assigned.heading, *assigned.closing)
