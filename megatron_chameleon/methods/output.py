"""Functions that methods share: domain selection, mixture file and table."""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, MixtureWarning
from megatron_chameleon.artifacts.provenance import without_credentials
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.options import SourceOptions, flat
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange import write_blend
from megatron_chameleon.methods.options import OutputOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.ranges import flag_of

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


def cost_totals(cost: Cost) -> dict[str, float]:
    """Return the ``total_cost`` that a mixture's parameters contain."""
    return {"flops": cost.flops, "device_seconds": cost.device_seconds}


def write_and_print(
    mixture: Mixture,
    options: OutputOptions,
    corpus: Corpus | None,
    heading: str,
    *closing: str,
    source: SourceOptions | None = None,
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
        source: the raw text, without a corpus.
    """
    mixture.save(options.output)
    lines = [heading, mixture_table(mixture)]
    if mixture.max_epochs is not None:
        capped = format_names(mixture.capped or ["none"])
        lines.append(f"capped at {mixture.max_epochs:g} epochs: {capped}")
    print("\n".join([*lines, *closing, *write_blend(options.output, mixture, corpus)]))
    folder = "CORPUS" if corpus is None else shlex.quote(str(corpus.root))
    train = (
        f"megatron-chameleon pretrain_gpt --corpus {folder} --mixture "
        f"{shlex.quote(str(options.output))} --run-dir RUN"
    )
    if corpus is not None:
        print(f"written to {options.output}; next: {train}")
        return
    print(f"written to {options.output}")
    if source is not None:
        words = ["--input", *map(without_credentials, flat(source.input))]
        for field in dataclasses.fields(source)[1:]:
            if (value := getattr(source, field.name)) != field.default:
                words += [flag_of(field.name), str(value)]
        print(
            f"next: megatron-chameleon preprocess_data {shlex.join(words)} --tokenizer-model "
            f"TOKENIZER --output CORPUS\nthen: {train} --model MODEL"
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
