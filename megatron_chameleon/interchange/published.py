"""Domain weights printed in the Chameleon paper, named DATA SET/COLUMN.

published_columns.json has the numbers as printed, with the domain names of the recipes in
examples/data. Some columns do not sum to 1; normalize them before use.
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

FILE_NAME = "published_columns.json"


@dataclasses.dataclass(frozen=True)
class PublishedColumn:
    """One printed column.

    Attributes:
        name: DATA SET/COLUMN.
        source: the paper.
        table: the caption of the table.
        printed: domain -> weight as printed.
        own_names: name of a domain in the data set -> its name in ``printed``, for domains whose
            names differ.
        flops: printed FLOPs to obtain the weights; None if not printed.
    """

    name: str
    source: str
    table: str
    printed: Mapping[str, float]
    own_names: Mapping[str, str]
    flops: float | None = None

    @property
    def printed_sum(self) -> float:
        """Sum of the printed weights."""
        return math.fsum(self.printed.values())


@functools.cache
def published_columns() -> Mapping[str, PublishedColumn]:
    """All columns by name, in the order of the file."""
    text = resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")
    body: dict[str, Any] = json.loads(text)
    columns = [
        PublishedColumn(
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


def published_column(name: str) -> PublishedColumn:
    """The column called ``name``.

    Raises:
        UserError: for an unknown name, listing the known names.
    """
    columns = published_columns()
    if name not in columns:
        raise UserError(f"--published {name}: unknown column; choose from {', '.join(columns)}")
    return columns[name]
