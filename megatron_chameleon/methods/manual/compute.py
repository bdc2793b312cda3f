"""Read known weights, and match their names with the domains of a corpus."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture import normalized
from megatron_chameleon.artifacts.published import published_column
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.domains import format_names
from megatron_chameleon.methods.manual.options import ManualOptions
from megatron_chameleon.methods.output import AssignedWeights, run_training_free
from megatron_chameleon.mixture.checks import Array

FILE_SUFFIXES = (".json", ".csv")
CSV_COLUMNS = ("domain", "weight")


@dataclasses.dataclass(frozen=True)
class KnownWeights:
    """Weights by the names of their source, with any sum.

    Attributes:
        source: their origin for messages.
        weights: name -> weight.
        aliases: another name that a corpus may use for a domain -> its name in ``weights``.
        parameters: for the mixture.
        inputs: name of the file read -> its hash.
        paper_flops: FLOPs by the formulas of Chameleon's tables, if known.
        cost: total cost of obtaining them, if known.
    """

    source: str
    weights: Mapping[str, float]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paper_flops: float | None = None
    cost: Cost | None = None


def compute_manual(options: ManualOptions) -> None:
    """Write the given weights."""

    def assign(corpus: Corpus, names: list[str]) -> AssignedWeights:
        known = read_weights(options)
        weights, notes = match_domains(known, options.renames, corpus.names, names)
        return AssignedWeights(
            weights,
            heading=f"Weights from {known.source}",
            parameters={**known.parameters, "rename": options.renames},
            inputs=known.inputs,
            closing=notes,
            paper_flops=known.paper_flops,
            inherited=known.cost,
        )

    run_training_free("manual", options, assign)


def read_weights(options: ManualOptions) -> KnownWeights:
    """Read ``--weights`` or ``--published``.

    Raises:
        UserError: if they cannot be read.
    """
    if options.published is not None:
        return _read_column(options.published)
    assert options.weights is not None
    if not options.weights.endswith(FILE_SUFFIXES):
        return _parse_weights(options.weights)
    path = Path(options.weights)
    return _read_mixture(path, options.output) if path.suffix == ".json" else _read_csv(path)


def _read_column(name: str) -> KnownWeights:
    column = published_column(name)
    return KnownWeights(
        source=f"--published {name}",
        weights=column.printed,
        aliases=column.own_names,
        parameters={
            "published": name,
            "source": f"{column.source}, table '{column.table}'",
            "printed": dict(column.printed),
            "printed_sum": column.printed_sum,
        },
        paper_flops=column.flops,
    )


def _parse_weights(text: str) -> KnownWeights:
    source = f"--weights {text}"
    pairs = []
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, number = item.rpartition("=")
        if not equals or not name.strip():
            raise UserError(
                f"{source}: '{item}' is not NAME=WEIGHT; a file must end with "
                f"{' or '.join(FILE_SUFFIXES)}"
            )
        pairs.append((name.strip(), number.strip()))
    return KnownWeights(source, _numbers(pairs, source))


def _read_mixture(path: Path, output: Path) -> KnownWeights:
    if path.resolve() == output.resolve():
        raise UserError(f"--weights and --output are both {path}: choose another --output")
    mixture = Mixture.load(path)
    return KnownWeights(
        source=str(path),
        weights=mixture.weights,
        parameters={
            "file": str(path),
            "file_method": mixture.method,
            **_cost_sources(mixture, path, output.parent),
        },
        inputs={"given mixture": mixture.hash},
        paper_flops=mixture.parameters.get("paper_flops"),
        cost=_total_cost(mixture),
    )


def _read_csv(path: Path) -> KnownWeights:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, skipinitialspace=True))
        digest = sha256_of_files(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--weights {path}: cannot be read: {error}; use another file") from error
    domain, weight = CSV_COLUMNS
    if not rows or not set(CSV_COLUMNS) <= rows[0].keys():
        raise UserError(
            f"{path}: must have a header with the columns {domain} and {weight}, and a row per "
            "domain"
        )
    pairs = [((row[domain] or "").strip(), (row[weight] or "").strip()) for row in rows]
    weights = _numbers(pairs, str(path))
    return KnownWeights(str(path), weights, parameters={"file": str(path)}, inputs={"csv": digest})


def _numbers(pairs: Iterable[tuple[str, str]], source: str) -> dict[str, float]:
    """Name -> number.

    Raises:
        UserError: for a weight that is not a number, a duplicate name, or no pairs at all.
    """
    weights: dict[str, float] = {}
    for name, number in pairs:
        if name in weights:
            raise UserError(f"{source}: duplicate domain '{name}'; name it once")
        try:
            weights[name] = float(number)
        except ValueError:
            raise UserError(
                f"{source}: the weight '{number}' of '{name}' is not a number"
            ) from None
    if not weights:
        raise UserError(f"{source}: no domain is named")
    return weights


def _cost_sources(mixture: Mixture, path: Path, folder: Path) -> dict[str, Any]:
    """Parameters that locate the cost of a mixture whose weights are reused.

    ``made_from`` names the file, for its own cost and for the artifacts that it names by hash, and
    those that it names by path, so that they are found without the file.

    Args:
        mixture: to be reused.
        path: its file.
        folder: of the new mixture, to which the paths are relative.
    """
    named = [path.parent / place for place in mixture.parameters.get("made_from", ())]
    places = [os.path.relpath(place.resolve(), folder.resolve()) for place in (path, *named)]
    unknown = mixture.parameters.get("unknown_costs")
    return {"made_from": places} | ({"unknown_costs": unknown} if unknown else {})


def _total_cost(mixture: Mixture) -> Cost | None:
    """Total cost of obtaining ``mixture``; None if its file does not hold all of it.

    A Chameleon mixture holds the cost of its algebra; the costs of proxy and embeddings are in
    their own artifacts.
    """
    parameters = mixture.parameters
    recorded: Any = parameters.get("total_cost")
    if isinstance(recorded, dict):
        return Cost(float(recorded["flops"]), float(recorded["device_seconds"]))
    by_hash = mixture.provenance is not None and "checkpoint" in mixture.provenance.inputs
    if by_hash or parameters.get("made_from") or parameters.get("unknown_costs"):
        return None
    return mixture.cost


def match_domains(
    known: KnownWeights, renames: Sequence[str], corpus_names: Sequence[str], names: Sequence[str]
) -> tuple[Array, list[str]]:
    """Known weights by the domains of a corpus.

    Args:
        known: weights by the names of their source.
        renames: values of ``--rename``.
        corpus_names: all domains of the corpus.
        names: domains to weigh; the weights of the others are dropped.

    Returns:
        [k] float64 in the order of ``names``, summing to 1, and lines for under the table.

    Raises:
        UserError: for an unknown name, an invalid weight, or no weight above 0 for ``names``.
    """
    # Printed columns rarely sum to 1, and the lines report it: no warning.
    printed_sum = known.parameters.get("printed_sum", 1.0)
    shares = {name: weight / printed_sum for name, weight in known.weights.items()}
    renamed = _renamed(known, normalized(shares, known.source), renames, corpus_names)
    kept = {name: renamed.get(name, 0.0) for name in names}
    total = math.fsum(kept.values())
    if total <= 0:
        raise UserError(f"{known.source}: no weight above 0 for any of {format_names(names)}")
    notes = []
    if "printed_sum" in known.parameters:
        notes.append(
            f"{known.parameters['source']}: the printed weights sum to {printed_sum:.4g} and were "
            "divided by it"
        )
    if total < 1.0 - 1e-9:
        notes.append(
            f"dropped {1.0 - total:.4f} of the weight; the other domains keep their ratios"
        )
    if without := [name for name in kept if name not in renamed]:
        notes.append(f"weight 0 for {format_names(without)}, not in {known.source}")
    return np.array(list(kept.values())) / total, notes


def _renamed(
    known: KnownWeights,
    weights: Mapping[str, float],
    renames: Sequence[str],
    corpus_names: Sequence[str],
) -> dict[str, float]:
    """Weights by the names of the corpus, summed over names that map to the same domain."""
    table = _rename_table(known, renames, corpus_names)
    in_corpus = set(corpus_names)
    aliases = {name: alias for alias, name in known.aliases.items() if alias in in_corpus}
    renamed: dict[str, float] = {}
    unknown = []
    for name, weight in weights.items():
        new = table.get(name, name if name in in_corpus else aliases.get(name, name))
        if name not in table and new not in in_corpus:
            unknown.append(name)
        elif new:
            renamed[new] = renamed.get(new, 0.0) + weight
    if unknown:
        raise UserError(
            f"{known.source}: not in the corpus: {format_names([f'{n!r}' for n in unknown])}; its "
            f"domains are {format_names(corpus_names)}; add --rename {unknown[0]}=NAME with the "
            f"corpus's name, or --rename {unknown[0]}= to drop it"
            + (", for each of them" if len(unknown) > 1 else "")
        )
    return renamed


def _rename_table(
    known: KnownWeights, renames: Sequence[str], corpus_names: Sequence[str]
) -> dict[str, str]:
    """OLD -> NEW of ``--rename``; NEW is empty for dropped names."""
    table: dict[str, str] = {}
    for rename in renames:
        old, equals, new = map(str.strip, rename.partition("="))
        if not equals or old not in known.weights:
            raise UserError(
                f"--rename {rename}: must be OLD=NEW, with OLD one of "
                f"{format_names(list(known.weights))}"
            )
        if old in table:
            raise UserError(f"--rename {rename}: '{old}' is renamed twice; name it once")
        if new and new not in corpus_names:
            raise UserError(
                f"--rename {rename}: the corpus has no domain '{new}'; NEW must be one of "
                f"{format_names(corpus_names)}, or empty to drop '{old}'"
            )
        table[old] = new
    return table
