"""Weights as they are given: in a line, in a file, or by the name of a printed column."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.published.columns import published_column
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.given.inherited_cost import cost_parameters, full_cost

FILE_SUFFIXES = (".json", ".csv")
CSV_COLUMNS = ("domain", "weight")


@dataclasses.dataclass(frozen=True)
class GivenWeights:
    """Weights before they are brought to a corpus; their sum may be any.

    Attributes:
        where: what gave them, for messages.
        weights: name -> weight.
        own_names: another name that a corpus may have for a domain -> its name in ``weights``.
        parameters: what the mixture should say of them.
        inputs: name of the file read -> its hash.
        paper_flops: FLOPs to find them as Chameleon's tables print them, where that is known.
        cost: what they have cost in all, where that is known.
    """

    where: str
    weights: Mapping[str, float]
    own_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paper_flops: float | None = None
    cost: Cost | None = None


def read_given(weights: str | None, published: str | None, output: Path) -> GivenWeights:
    """What ``--weights`` or ``--published`` gives.

    Args:
        weights: of the one flag.
        published: of the other.
        output: where the mixture is written; what it was made from is named relative to its folder.

    Raises:
        UserError: if neither or both are there, or what is given cannot be read.
    """
    if weights is not None and published is not None:
        raise UserError("--weights and --published both give the weights: leave one of them out")
    if published is not None:
        return _of_column(published)
    if weights is None:
        raise UserError(
            "--method manual takes its weights from --weights a=0.3,b=0.7, --weights FILE or "
            "--published NAME: give one of them"
        )
    if not weights.endswith(FILE_SUFFIXES):
        return _of_line(weights)
    path = Path(weights)
    return _of_mixture(path, output) if path.suffix == ".json" else _of_csv(path)


def _of_column(name: str) -> GivenWeights:
    column = published_column(name)
    return GivenWeights(
        where=f"--published {name}",
        weights=column.printed,
        own_names=column.own_names,
        parameters={
            "published": name,
            "source": f"{column.source}, table '{column.table}'",
            "printed": dict(column.printed),
            "printed_sum": column.printed_sum,
        },
        paper_flops=column.flops,
    )


def _of_line(text: str) -> GivenWeights:
    where = f"--weights {text}"
    pairs = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, number = part.rpartition("=")
        if not equals or not name.strip():
            raise UserError(
                f"{where}: '{part}' is not NAME=WEIGHT; a file ends in {' or '.join(FILE_SUFFIXES)}"
            )
        pairs.append((name.strip(), number.strip()))
    return GivenWeights(where, _numbers(pairs, where))


def _of_mixture(path: Path, output: Path) -> GivenWeights:
    if path.resolve() == output.resolve():
        raise UserError(f"--weights and --output are both {path}: give another --output")
    mixture = Mixture.load(path)
    return GivenWeights(
        where=str(path),
        weights=mixture.weights,
        parameters={
            "file": str(path),
            "file_method": mixture.method,
            **cost_parameters(mixture, path, output.parent),
        },
        inputs={"given mixture": mixture.hash},
        paper_flops=mixture.parameters.get("paper_flops"),
        cost=full_cost(mixture),
    )


def _of_csv(path: Path) -> GivenWeights:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, skipinitialspace=True))
        digest = sha256_of_files(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--weights {path}: cannot be read: {error}; give another file") from error
    domain, weight = CSV_COLUMNS
    if not rows or not set(CSV_COLUMNS) <= rows[0].keys():
        raise UserError(
            f"{path}: a header with the columns {domain} and {weight} is expected, and a row for "
            "each domain below it"
        )
    pairs = [((row[domain] or "").strip(), (row[weight] or "").strip()) for row in rows]
    weights = _numbers(pairs, str(path))
    return GivenWeights(str(path), weights, parameters={"file": str(path)}, inputs={"csv": digest})


def _numbers(pairs: Iterable[tuple[str, str]], where: str) -> dict[str, float]:
    """Name -> number. Raises UserError for what is none, and for a name that is there twice."""
    weights: dict[str, float] = {}
    for name, number in pairs:
        if name in weights:
            raise UserError(f"{where}: domain '{name}' is there twice; name it once")
        try:
            weights[name] = float(number)
        except ValueError:
            raise UserError(f"{where}: the weight '{number}' of '{name}' is not a number") from None
    if not weights:
        raise UserError(f"{where}: it names no domain")
    return weights
