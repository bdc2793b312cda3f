"""Functions that methods share: domain selection, epoch limit, mixture file and table."""

from __future__ import annotations

import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    Mixture,
    MixtureWarning,
    Stopwatch,
    implied_epochs,
    provenance,
)
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.console import align_columns
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange import write_blend
from megatron_chameleon.methods.options import ChosenDomainsOptions, OutputOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.weights import capped_weights

# With more than MAX_ROWS domains, a table shows only the heaviest and the lightest.
MAX_ROWS = 40
HEAVIEST, LIGHTEST = 25, 10
SMALL_WEIGHT = 1e-3
# If a weight exceeds this value, a warning states that one domain has nearly all of the weight.
ONE_HOT = 0.95


def warn(message: str) -> None:
    """Issue a MixtureWarning, for a mixture that should be used with care."""
    warnings.warn(message, MixtureWarning, stacklevel=3)


def by_name(names: Iterable[str], values: Array) -> dict[str, Any]:
    """Map each name to its entry of ``values``: a number, or a list of numbers."""
    return dict(zip(names, values.tolist(), strict=True))


def select_domains(
    selection: str | None,
    names: Sequence[str],
    where: object,
    flag: str = "--domains",
    held_out: Collection[str] = (),
) -> list[str]:
    """Return the domains in the comma-separated value of ``flag``; None means all.

    Args:
        selection: value of ``flag``.
        names: existing domains; the result is in this order.
        where: location of the domains, for messages.
        flag: name of the option.
        held_out: held-out domains, for messages.

    Raises:
        UserError: for an unknown name, or that of a held-out domain.
    """
    if selection is None:
        return list(names)
    selected = [name.strip() for name in selection.split(",") if name.strip()]
    known = set(names)
    unknown = [name for name in selected if name not in known]
    if unknown or not selected:
        problem = f"unknown domain '{unknown[0]}'" if unknown else "no domain is named"
        if unknown and unknown[0] in held_out:
            problem = f"'{unknown[0]}' is held out from training, so it has no weight"
        raise UserError(f"{flag} {selection}: {problem}; {where} has {format_names(names)}")
    chosen = set(selected)
    return [name for name in names if name in chosen]


def require_training_tokens(corpus: Corpus, names: Iterable[str], purpose: str) -> None:
    """Raise UserError for the first of ``names`` without training tokens.

    Args:
        corpus: the corpus of these domains.
        names: domains that need training tokens.
        purpose: the use of the tokens, as in "to embed".
    """
    for name in names:
        if corpus.domains[name].train.tokens == 0:
            raise UserError(
                f"domain '{name}' of {corpus.root} has no training tokens {purpose}; exclude it "
                "with --domains, or preprocess the corpus again, with text for it or without it"
            )


@dataclasses.dataclass(frozen=True)
class EpochLimit:
    """Limit on the epochs of each domain in a run of ``token_budget`` training tokens.

    Attributes:
        tokens: domain -> training tokens.
        token_budget: tokens of the target run; epochs are not computed without it.
        max_epochs: maximum epochs of each domain; no limit if None.
    """

    tokens: Mapping[str, int]
    token_budget: int | None
    max_epochs: float | None

    def check(self) -> None:
        """Raise UserError if the domains cannot fill the budget within the limit."""
        self.apply(np.full(len(self.tokens), 1.0 / len(self.tokens)))

    @property
    def caps(self) -> Array | None:
        """Maximum weight [num_domains] of each domain; None without a limit."""
        if self.max_epochs is None or self.token_budget is None:
            return None
        tokens = np.array(list(self.tokens.values()), np.float64)
        return tokens * (self.max_epochs / self.token_budget)

    def apply(self, weights: Array) -> Array:
        """Return the nearest weights within the limit.

        Args:
            weights: [num_domains] float64, in the order of ``tokens``.

        Raises:
            UserError: if the domains with a weight cannot fill the budget.
        """
        try:
            return weights if self.caps is None else capped_weights(weights, self.caps)
        except ValueError as error:
            raise UserError(
                f"--max-epochs {self.max_epochs:g}: the weighted domains have too few tokens for "
                f"--token-budget {self.token_budget:,}; raise --max-epochs or lower --token-budget"
            ) from error

    def mixture_fields(self, unconstrained: Array, limited: Array | None = None) -> dict[str, Any]:
        """Return the fields of a Mixture for weights, epochs and limit. Warn about capped domains.

        Args:
            unconstrained: [num_domains] float64 weights without the limit.
            limited: [num_domains] float64 weights within the limit; default: the nearest ones.
        """
        names = list(self.tokens)
        if limited is None:
            limited = self.apply(unconstrained)
        weights = by_name(names, limited)
        if self.token_budget is None:
            return {"weights": weights}
        epochs = implied_epochs(self.tokens, weights, self.token_budget)
        fields = {"weights": weights, "token_budget": self.token_budget, "epochs": epochs}
        if self.caps is None:
            return fields
        capped = [names[i] for i in np.flatnonzero((unconstrained > 0) & (limited == self.caps))]
        if capped:
            warn(
                f"--max-epochs {self.max_epochs:g} with --token-budget {self.token_budget:,} "
                f"lowers the weights of {format_names(capped)}, and raises the other weights"
            )
        before = by_name(names, unconstrained)
        return {**fields, "max_epochs": self.max_epochs, "unconstrained": before, "capped": capped}


def epoch_limit(options: OutputOptions, corpus: Corpus, names: Sequence[str]) -> EpochLimit:
    """Return the epoch limit that ``options`` set for the domains ``names`` of ``corpus``."""
    available = corpus.train_tokens
    tokens = {name: available[name] for name in names}
    return EpochLimit(tokens, options.token_budget, options.max_epochs)


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
    """

    weights: Array
    heading: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    closing: Sequence[str] = ()
    paper_flops: float | None = None
    inherited: Cost | None = None


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
    if int(os.environ.get("RANK", "0")) != 0:
        return
    check_output(options.output, Mixture.KIND)
    stopwatch = Stopwatch()
    corpus = Corpus.load(options.corpus)
    names = select_domains(options.domains, corpus.names, corpus.root, held_out=corpus.held_out)
    limit = epoch_limit(options, corpus, names)
    limit.check()
    assigned = assign(corpus, names)
    fields = limit.mixture_fields(assigned.weights)
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


def cost_totals(cost: Cost) -> dict[str, float]:
    """Return the ``total_cost`` that a mixture's parameters contain."""
    return {"flops": cost.flops, "device_seconds": cost.device_seconds}


def write_and_print(
    mixture: Mixture, options: OutputOptions, corpus: Corpus | None, heading: str, *closing: str
) -> None:
    """Write ``mixture`` to ``--output``; print its table and the next command. Called on one rank.

    The Megatron Bridge blend is written next to the mixture, and the arguments of Megatron-LM's
    ``--data-path`` are printed.

    Args:
        mixture: mixture with all fields set, including its cost.
        options: options of the method.
        corpus: corpus with the mixture's domains; None for raw text.
        heading: the line above the table: the method and its main settings.
        closing: lines under the table.
    """
    mixture.save(options.output)
    lines = [heading, mixture_table(mixture)]
    if mixture.max_epochs is not None:
        capped = format_names(mixture.capped or ["none"])
        lines.append(f"capped at {mixture.max_epochs:g} epochs: {capped}")
    print("\n".join([*lines, *closing, *write_blend(options.output, mixture, corpus)]))
    if corpus is None:
        print(f"written to {options.output}")
        return
    folder, file = shlex.quote(str(corpus.root)), shlex.quote(str(options.output))
    print(
        f"written to {options.output}; next: megatron-chameleon pretrain_gpt --corpus {folder} "
        f"--mixture {file} --run-dir RUN"
    )


def format_weight(weight: float) -> str:
    """Format a weight with four decimals, or in scientific notation if it is small."""
    return f"{weight:.4f}" if weight == 0 or weight >= SMALL_WEIGHT else f"{weight:.1e}"


def mixture_table(mixture: Mixture) -> str:
    """Format a table of scores, weights and epochs, with one row per domain.

    If there are more than ``MAX_ROWS`` domains, the table shows only those with the largest and the
    smallest weights, sorted by weight.
    """
    names = list(mixture.weights)
    hidden = len(names) - HEAVIEST - LIGHTEST if len(names) > MAX_ROWS else 0
    if hidden:
        names.sort(key=lambda name: -mixture.weights[name])
        names = names[:HEAVIEST] + names[-LIGHTEST:]
    target = mixture.parameters.get("target", {})
    interval = f"{100 * (mixture.confidence or 0):g}% interval"
    columns: list[tuple[str, Mapping[str, Any] | None, Callable[[Any], str]]] = [
        ("windows", mixture.parameters.get("windows"), str),
        ("score", mixture.scores, "{:.3g}".format),
        ("prior", target.get("prior"), "{:.2f}".format),
        ("without target", target.get("weights_without"), format_weight),
        ("without limit", mixture.unconstrained, format_weight),
        ("weight", mixture.weights, format_weight),
        (interval, mixture.intervals, lambda ends: " to ".join(map(format_weight, ends))),
        ("epochs", mixture.epochs, "{:.2f}".format),
    ]
    cells = [["domain", *names]]
    for heading, values, form in columns:
        if values:
            cells.append([heading, *(form(values[name]) for name in names)])
    lines = align_columns(list(zip(*cells, strict=True)))
    if hidden:
        lines.insert(1 + HEAVIEST, f"... {hidden:,} domains not shown; the file lists all domains")
    return "\n".join(lines)
