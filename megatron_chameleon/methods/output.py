"""The result of a method: weights within the epoch limit, the mixture file, and its table."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.domains import format_names, require_training_tokens, select_domains
from megatron_chameleon.methods.options import ChosenDomainsOptions, MethodOptions
from megatron_chameleon.mixture import CappedWeights, capped_weights, windows_needed
from megatron_chameleon.mixture.checks import Array

# A table of more domains than MAX_ROWS shows the heaviest and the lightest.
MAX_ROWS = 40
HEAVIEST, LIGHTEST = 25, 10
SMALL_WEIGHT = 1e-3


@dataclasses.dataclass(frozen=True)
class EpochLimit:
    """At most ``max_epochs`` epochs of each domain within ``token_budget`` training tokens.

    Attributes:
        tokens: domain -> training tokens.
        token_budget: tokens of the training to come; epochs are not computed without it.
        max_epochs: no limit if None.
    """

    tokens: Mapping[str, int]
    token_budget: int | None
    max_epochs: float | None

    def check(self) -> None:
        """Raise UserError if the domains cannot fill the budget within the limit."""
        if self.max_epochs is None or self.token_budget is None:
            return
        available = self.max_epochs * sum(self.tokens.values())
        if available < self.token_budget:
            raise UserError(
                f"--max-epochs {self.max_epochs:g}: the weighted domains have {available:,.0f} "
                f"tokens in {self.max_epochs:g} epochs, less than --token-budget "
                f"{self.token_budget:,}; raise --max-epochs or lower --token-budget"
            )

    def apply(self, weights: Array) -> CappedWeights:
        """The nearest weights within the limit.

        Args:
            weights: [num_domains] float64, in the order of ``tokens``.

        Raises:
            UserError: if the domains with a weight cannot fill the budget.
        """
        if self.max_epochs is None or self.token_budget is None:
            return CappedWeights(weights, ())
        tokens = np.array(list(self.tokens.values()), np.float64)
        caps = tokens * (self.max_epochs / self.token_budget)
        try:
            return capped_weights(weights, caps)
        except ValueError as error:
            raise UserError(f"--max-epochs {self.max_epochs:g}: {error}") from error

    def mixture_fields(self, unconstrained: Array) -> dict[str, Any]:
        """Fields of a Mixture: weights, epochs and the effect of the limit. Warn of capped domains.

        Args:
            unconstrained: [num_domains] float64 weights without the limit.
        """
        limited = self.apply(unconstrained)
        weights = dict(zip(self.tokens, limited.weights.tolist(), strict=True))
        if self.token_budget is None:
            return {"weights": weights}
        epochs = implied_epochs(self.tokens, weights, self.token_budget)
        fields = {"weights": weights, "token_budget": self.token_budget, "epochs": epochs}
        if self.max_epochs is None:
            return fields
        before = dict(zip(self.tokens, unconstrained.tolist(), strict=True))
        names = list(self.tokens)
        capped = [names[position] for position in limited.binding]
        if capped:
            epochs_before = implied_epochs(self.tokens, before, self.token_budget)
            most = max(capped, key=lambda name: epochs_before[name])
            warnings.warn(
                f"--max-epochs {self.max_epochs:g} caps {format_names(capped)} and raises the "
                f"other weights; without it '{most}' would be repeated for "
                f"{epochs_before[most]:.2f} epochs in {self.token_budget:,} tokens",
                MixtureWarning,
                stacklevel=2,
            )
        return {
            **fields,
            "max_epochs": self.max_epochs,
            "unconstrained": before,
            "capped": capped,
        }


def epoch_limit(options: MethodOptions, corpus: Corpus, names: Sequence[str]) -> EpochLimit:
    """The epoch limit of ``options`` over the domains ``names`` of ``corpus``."""
    available = corpus.train_tokens
    tokens = {name: available[name] for name in names}
    return EpochLimit(tokens, options.token_budget, options.max_epochs)


@dataclasses.dataclass(frozen=True)
class AssignedWeights:
    """Weights of a training-free method, before the epoch limit.

    Attributes:
        weights: [k] float64, summing to 1, in the order of the given domains.
        heading: the line above the table.
        parameters: the method's settings, for the mixture.
        inputs: name -> hash of each artifact read besides the corpus.
        closing: lines under the table.
        paper_flops: FLOPs by the formulas of Chameleon's tables; None if they do not cover it.
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
        method: its name.
        options: its options.
        assign: weights of the selected domains of the corpus.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    check_output(options.output, Mixture.KIND)
    stopwatch = Stopwatch()
    corpus = Corpus.load(options.corpus)
    names = select_domains(options.domains, corpus)
    limit = epoch_limit(options, corpus, names)
    limit.check()
    assigned = assign(corpus, names)
    fields = limit.mixture_fields(assigned.weights)
    weighted = [name for name, weight in fields["weights"].items() if weight > 0]
    require_training_tokens(corpus, weighted, "to sample")
    cost = stopwatch.cost()
    costs: dict[str, Any] = {}
    if assigned.inherited is not None:
        total = assigned.inherited + cost
        costs["total_cost"] = {"flops": total.flops, "device_seconds": total.device_seconds}
    if assigned.paper_flops is not None:
        costs["paper_flops"] = assigned.paper_flops
    mixture = Mixture(
        **fields,
        method=method,
        parameters={**assigned.parameters, **costs},
        provenance=provenance(options, {"corpus": corpus.hash, **assigned.inputs}),
        cost=cost,
    )
    write_and_print(mixture, options, assigned.heading, *assigned.closing)


def write_and_print(mixture: Mixture, options: MethodOptions, heading: str, *closing: str) -> None:
    """Write ``mixture`` to ``--output`` and print its table. Called on one rank.

    Args:
        mixture: complete, with its cost.
        options: of the method.
        heading: the line above the table: the method and its main settings.
        closing: lines under the table.
    """
    mixture.save(options.output)
    print("\n".join([heading, mixture_table(mixture), *epoch_limit_lines(mixture), *closing]))
    print(next_command(options))


def next_command(options: MethodOptions) -> str:
    """The last printed line: the output file, and the command that trains with it."""
    return (
        f"written to {options.output}; next: tools/pretrain_gpt.py --corpus {options.corpus} "
        f"--mixture {options.output} --run-dir ..."
    )


def format_weight(weight: float) -> str:
    """A weight with four decimals, or in scientific notation if small."""
    return f"{weight:.4f}" if weight == 0 or weight >= SMALL_WEIGHT else f"{weight:.1e}"


def mixture_table(mixture: Mixture) -> str:
    """A table with one row per domain: scores, weights and what they imply.

    Of more than ``MAX_ROWS`` domains, only the heaviest and the lightest, sorted by weight.
    """
    columns: list[tuple[str, Callable[[str], str]]] = []
    if windows := mixture.parameters.get("windows"):
        columns.append(("windows", lambda name: f"{windows[name]}"))
    if scores := mixture.scores:
        columns.append(("score", lambda name: f"{scores[name]:.3g}"))
    if target := mixture.parameters.get("target"):
        prior, without = target["prior"], target["weights_without"]
        columns.append(("prior", lambda name: f"{prior[name]:.2f}"))
        columns.append(("without target", lambda name: format_weight(without[name])))
    if unconstrained := mixture.unconstrained:
        columns.append(("without limit", lambda name: format_weight(unconstrained[name])))
    columns.append(("weight", lambda name: format_weight(mixture.weights[name])))
    if intervals := mixture.intervals:
        heading = f"{100 * (mixture.confidence or 0):g}% interval"
        columns.append((heading, lambda name: " to ".join(map(format_weight, intervals[name]))))
    if epochs := mixture.epochs:
        columns.append(("epochs", lambda name: f"{epochs[name]:.2f}"))
    heavy, light = list(mixture.weights), []
    if len(heavy) > MAX_ROWS:
        heavy.sort(key=lambda name: -mixture.weights[name])
        heavy, light = heavy[:HEAVIEST], heavy[-LIGHTEST:]
    headings = ["domain", *(heading for heading, _ in columns)]
    rows = [[name, *(cell(name) for _, cell in columns)] for name in heavy + light]
    lines = align_columns([headings, *rows])
    if light:
        hidden = len(mixture.weights) - len(rows)
        lines.insert(1 + len(heavy), f"... {hidden:,} domains between; the file has all of them")
    return "\n".join(lines)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines: first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def closing_lines(mixture: Mixture, precision: float) -> str:
    """Lines under a Chameleon table: certainty of the order, windows needed, epoch limit.

    Args:
        mixture: with bootstrap intervals.
        precision: sufficient half width of an interval.
    """
    lines = []
    if mixture.outweighs:
        one, other, likely = min(mixture.outweighs, key=lambda pair: pair[2])
        lines.append(f"least certain order: {one} outweighs {other} in {likely:.0%} of resamples")
    windows = mixture.parameters.get("windows")
    if mixture.intervals and windows:
        half_width = max(high - low for low, high in mixture.intervals.values()) / 2
        fewest = min(windows.values())
        needed = windows_needed(half_width, fewest, precision)
        verdict = "are enough" if needed <= fewest else f"are too few, about {needed:,} needed"
        lines.append(
            f"widest interval: +-{format_weight(half_width)}; for +-{precision:g}, {fewest:,} "
            f"windows per domain {verdict}"
        )
    return "\n".join([*lines, *epoch_limit_lines(mixture)])


def epoch_limit_lines(mixture: Mixture) -> list[str]:
    """A line on the effect of the epoch limit, if there is one."""
    if mixture.max_epochs is None:
        return []
    if not mixture.capped:
        return [f"no domain reaches the limit of {mixture.max_epochs:g} epochs"]
    return [f"capped at {mixture.max_epochs:g} epochs: {format_names(mixture.capped)}"]
