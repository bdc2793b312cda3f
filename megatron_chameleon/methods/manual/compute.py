"""Read known weights, and match their names with the domains of a corpus."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture import normalized
from megatron_chameleon.artifacts.published import published_column
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.output import (
    AssignedWeights,
    format_names,
    run_training_free,
)


@dataclasses.dataclass(frozen=True)
class KnownWeights:
    """Weights by the names of their source, with any sum.

    Attributes:
        source: their origin for messages.
        weights: name -> weight.
        fields: of :class:`AssignedWeights`: parameters, inputs and costs.
        aliases: alternative domain name -> name in ``weights``.
        printed_sum: sum of the weights of a printed column.
    """

    source: str
    weights: Mapping[str, float]
    fields: dict[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    printed_sum: float | None = None


def compute_manual(options: ManualOptions) -> None:
    """Write known weights as a mixture."""

    def assign(corpus: Corpus, names: list[str]) -> AssignedWeights:
        known = read_weights(options)
        weights = match_domains(known, options.renames, corpus.names)
        kept = np.array([weights.get(name, 0.0) for name in names])
        total = math.fsum(kept)
        if total <= 0:
            raise UserError(f"{known.source}: no weight above 0 for any of {format_names(names)}")
        notes = []
        if known.printed_sum is not None:
            notes.append(f"the printed weights sum to {known.printed_sum:.4g}: divided by it")
        if total < 1.0 - 1e-9:
            notes.append(f"dropped {1.0 - total:.4f} of the weight")
        if without := [name for name in names if name not in weights]:
            notes.append(f"weight 0 for {format_names(without)}, not in {known.source}")
        known.fields["parameters"]["rename"] = options.renames
        return AssignedWeights(
            kept / total, f"Weights from {known.source}", closing=notes, **known.fields
        )

    run_training_free("manual", options, assign)


def read_weights(options: ManualOptions) -> KnownWeights:
    """Read ``--weights`` or ``--published``.

    Raises:
        UserError: if they cannot be read.
    """
    if options.published is not None:
        column = published_column(options.published)
        parameters = {
            "published": options.published,
            "source": f"{column.source}, table '{column.table}'",
            "printed": dict(column.printed),
            "printed_sum": column.printed_sum,
        }
        return KnownWeights(
            source=f"--published {options.published}",
            weights=column.printed,
            fields={"parameters": parameters, "paper_flops": column.flops},
            aliases=column.own_names,
            printed_sum=column.printed_sum,
        )
    assert options.weights is not None
    path = Path(options.weights)
    if path.suffix == ".json":
        return _read_mixture(path, options.output)
    fields: dict[str, Any] = {"parameters": {}}
    if path.suffix == ".csv":
        source = str(path)
        try:
            with path.open(encoding="utf-8-sig", newline="") as stream:
                rows = list(csv.DictReader(stream, skipinitialspace=True))
            if any(None in row for row in rows):
                raise csv.Error("a row has more values than the header")
            pairs = [(row["domain"] or "", row["weight"] or "") for row in rows]
            fields = {"parameters": {"file": source}, "inputs": {"csv": sha256_of_files(path)}}
        except KeyError:
            raise UserError(f"{path}: must have the columns domain and weight") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"--weights {path}: cannot be read: {error}") from error
    else:
        source = f"--weights {options.weights}"
        items = filter(None, map(str.strip, options.weights.split(",")))
        pairs = [(name, number) for name, _, number in (item.rpartition("=") for item in items)]
    weights: dict[str, float] = {}
    for name, number in ((name.strip(), number.strip()) for name, number in pairs):
        if not name:
            raise UserError(
                f"{source}: weight '{number}' has no domain; pass NAME=WEIGHT, or a file that ends "
                "with .json or .csv"
            )
        if name in weights:
            raise UserError(f"{source}: duplicate domain '{name}'; name it once")
        try:
            weights[name] = float(number)
        except ValueError:
            raise UserError(f"{source}: weight '{number}' of '{name}' is not a number") from None
    return KnownWeights(source, weights, fields)


def _read_mixture(path: Path, output: Path) -> KnownWeights:
    """Read the weights of a mixture file, and their total cost if the file records it.

    The parameter ``made_from`` of the new mixture lists this file, and the paths that the file
    itself lists. The report follows them to the other costs.
    """
    if path.resolve() == output.resolve():
        raise UserError(f"--weights and --output are both {path}: choose another --output")
    mixture = Mixture.load(path)
    old = mixture.parameters
    places = [path, *(path.parent / place for place in old.get("made_from", ()))]
    folder = output.parent.resolve()
    parameters: dict[str, Any] = {
        "file": str(path),
        "file_method": mixture.method,
        "made_from": [os.path.relpath(place.resolve(), folder) for place in places],
    }
    if old.get("unknown_costs"):
        parameters["unknown_costs"] = old["unknown_costs"]
    recorded, cost = old.get("total_cost"), None
    # A Chameleon mixture records the cost of its algebra only; its proxy and store record their
    # own.
    by_hash = mixture.provenance is not None and "checkpoint" in mixture.provenance.inputs
    if isinstance(recorded, dict):
        cost = Cost(float(recorded["flops"]), float(recorded["device_seconds"]))
    elif not (by_hash or old.get("made_from") or old.get("unknown_costs")):
        cost = mixture.cost
    fields = {
        "parameters": parameters,
        "inputs": {"given mixture": mixture.hash},
        "paper_flops": old.get("paper_flops"),
        "inherited": cost,
    }
    return KnownWeights(str(path), mixture.weights, fields)


def match_domains(
    known: KnownWeights, renames: Sequence[str], corpus_names: Sequence[str]
) -> dict[str, float]:
    """Known weights by the domains of a corpus; weights of names that map to one domain add up.

    Args:
        known: weights by the names of their source.
        renames: values of ``--rename``.
        corpus_names: the domains of the corpus.

    Returns:
        Domain -> weight, without dropped names; the weights sum to 1 if none is dropped.

    Raises:
        UserError: for an unknown name, or an invalid weight.
    """
    in_corpus = set(corpus_names)
    table = {name: name for name in known.weights if name in in_corpus}
    for alias, name in known.aliases.items():
        if alias in in_corpus:
            table.setdefault(name, alias)
    renamed = set()
    for rename in renames:
        old, equals, new = map(str.strip, rename.partition("="))
        problem = None
        if not equals or old not in known.weights:
            problem = f"must be OLD=NEW, with OLD one of {format_names(list(known.weights))}"
        elif old in renamed:
            problem = f"'{old}' is renamed twice; name it once"
        elif new and new not in in_corpus:
            problem = (
                f"the corpus has no domain '{new}'; NEW must be one of "
                f"{format_names(corpus_names)}, or empty to drop '{old}'"
            )
        if problem:
            raise UserError(f"--rename {rename}: {problem}")
        renamed.add(old)
        table[old] = new
    if unknown := [name for name in known.weights if name not in table]:
        raise UserError(
            f"{known.source}: not in the corpus: {format_names([f'{n!r}' for n in unknown])}; its "
            f"domains are {format_names(corpus_names)}; add --rename {unknown[0]}=NAME with the "
            f"corpus's name, or --rename {unknown[0]}= to drop it"
        )
    # Printed columns rarely sum to 1, and the notes report it: no warning.
    total = known.printed_sum or 1.0
    shares = {name: weight / total for name, weight in known.weights.items()}
    weights: dict[str, float] = {}
    for name, weight in normalized(shares, known.source).items():
        if new := table[name]:
            weights[new] = weights.get(new, 0.0) + weight
    return weights
