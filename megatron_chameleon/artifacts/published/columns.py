"""The columns of domain weights that Chameleon's paper prints, by the name DATA SET/COLUMN.

The figures are in columns.json as they stand in the tables, with the domains' names as the recipes
of examples/data give them. Not all columns sum to 1; whoever uses one divides by its sum.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from megatron_chameleon.errors import UserError

FILE_NAME = "columns.json"


@dataclasses.dataclass(frozen=True)
class Column:
    """One printed column.

    Attributes:
        name: DATA SET/COLUMN.
        source: the paper.
        table: the caption of the table.
        printed: domain -> weight as printed.
        own_names: what the data set itself calls a domain -> its name here.
        flops: to find it, as printed beside it; None where nothing is.
    """

    name: str
    source: str
    table: str
    printed: Mapping[str, float]
    own_names: Mapping[str, str]
    flops: float | None = None

    @property
    def printed_sum(self) -> float:
        """What the printed weights add up to."""
        return math.fsum(self.printed.values())


@functools.cache
def published_columns() -> Mapping[str, Column]:
    """Name -> column, in the order of the file."""
    text = resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")
    body: dict[str, Any] = json.loads(text)
    columns = [
        Column(
            name=f"{data_set}/{name}",
            source=body["source"],
            table=column["table"],
            printed=column["printed"],
            own_names=found["own_names"],
            flops=column.get("flops"),
        )
        for data_set, found in body["data_sets"].items()
        for name, column in found["columns"].items()
    ]
    return {column.name: column for column in columns}


def published_column(name: str) -> Column:
    """The column called ``name``.

    Raises:
        UserError: listing the names there are.
    """
    columns = published_columns()
    if name not in columns:
        raise UserError(
            f"--published {name}: there is no column of that name; there are {', '.join(columns)}"
        )
    return columns[name]
