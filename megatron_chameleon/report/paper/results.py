"""The results that Chameleon's paper prints, by the setting they belong to.

The figures are in results.json as they stand in the tables; averages and counts are worked out from
the rows here, and where the paper prints others, that is told. Its weights, with the FLOPs to find
them, are those of ``artifacts.published``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from megatron_chameleon.artifacts.published.columns import Column, published_column

FILE_NAME = "results.json"
LABELS = {
    "uniform": "Uniform",
    "human": "Human",
    "doremi": "DoReMi",
    "doge": "DoGE",
    "chameleon": "Chameleon",
    "chameleon-pretrain": "Chameleon (pretraining)",
    "chameleon-finetune": "Chameleon (fine-tuning)",
    "regmix": "RegMix",
    "mixing-laws": "Data Mixing Laws",
}


@dataclasses.dataclass(frozen=True)
class PaperColumn:
    """A printed column: domain or task -> figure, and what is printed below it.

    Attributes:
        printed: the rows.
        average: of them, as printed.
        better: in how many rows it is better than the baseline, as printed; None where no such
            figure is.
    """

    printed: Mapping[str, float]
    average: float
    better: int | None = None

    def average_of(self, rows: Iterable[str]) -> float:
        """The average of these rows, at least one, from the rows."""
        found = [self.printed[row] for row in rows]
        return math.fsum(found) / len(found)


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A printed table of perplexities or of accuracies in percent: method -> column."""

    caption: str
    columns: Mapping[str, PaperColumn]

    @property
    def rows(self) -> list[str]:
        """Domains or tasks, in the order of print."""
        return list(next(iter(self.columns.values())).printed)


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set of the paper.

    Attributes:
        name: as ``artifacts.published`` has it.
        label: as a text has it.
        weights: the methods whose final weights are printed.
        spellings: further names of its domains, in lower case, letters and digits alone.
        other_flops: method -> FLOPs of those that no weights are printed of.
        gpu_hours: method -> H100 hours to obtain the weights.
        base_gpu_hours: model size -> H100 hours to train it.
        doge_step_ratio: how many times the wall-clock time of a plain step DoGE's took.
    """

    name: str
    label: str
    weights: tuple[str, ...]
    spellings: Mapping[str, str]
    other_flops: Mapping[str, float]
    gpu_hours: Mapping[str, float]
    base_gpu_hours: Mapping[str, float]
    doge_step_ratio: float | None

    def weight_columns(self) -> dict[str, Column]:
        """Method -> printed weights, with the FLOPs to find them."""
        return {method: published_column(f"{self.name}/{method}") for method in self.weights}

    def flops(self) -> dict[str, float]:
        """Method -> FLOPs to find its weights, where they are printed; what costs nothing first."""
        columns = self.weight_columns()
        found = {method: c.flops for method, c in columns.items() if c.flops is not None}
        free = {method: 0.0 for method, flops in self.other_flops.items() if not flops}
        return {**free, **found, **self.other_flops}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model on one data set, the first table of each kind being the main one.

    Attributes:
        name: DATA SET-SIZE.
        data_set: trained and evaluated on.
        size: name of the model's size.
        model: its dimensions, by the names of a run's own record.
        batch_size: sequences in a step.
        fine_tuned: whether the model started from weights that were trained on the Pile.
        baseline: the method that the others are counted against.
        perplexity: tables of held-out perplexity per domain.
        downstream: tables of accuracy per task in percent, the mean over 0 to 5 shots.
    """

    name: str
    data_set: DataSet
    size: str
    model: Mapping[str, int]
    batch_size: int
    fine_tuned: bool
    baseline: str
    perplexity: tuple[PaperTable, ...]
    downstream: tuple[PaperTable, ...]

    @property
    def label(self) -> str:
        """For example 'SlimPajama, 684m'."""
        return f"{self.data_set.label}, {self.size}"


def source() -> str:
    """The paper's authors, title and place."""
    cited: str = _body()["source"]
    return cited


@functools.cache
def paper_settings() -> Mapping[str, Setting]:
    """Name -> setting, in the order of the file."""
    body = _body()
    return {
        name: Setting(
            name=name,
            data_set=_data_set(found["data_set"], body["data_sets"][found["data_set"]]),
            size=found["size"],
            model=body["models"][found["size"]],
            batch_size=found["batch_size"],
            fine_tuned=found.get("fine_tuned", False),
            baseline=found["baseline"],
            perplexity=_tables(found["perplexity"]),
            downstream=_tables(found["downstream"]),
        )
        for name, found in body["settings"].items()
    }


@functools.cache
def _body() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")
    body: dict[str, Any] = json.loads(text)
    return body


def _data_set(name: str, found: Mapping[str, Any]) -> DataSet:
    return DataSet(
        name=name,
        label=found["label"],
        weights=tuple(found["weights"]),
        spellings=found.get("spellings", {}),
        other_flops=found.get("other_flops", {}),
        gpu_hours=found.get("gpu_hours", {}),
        base_gpu_hours=found.get("base_gpu_hours", {}),
        doge_step_ratio=found.get("doge_step_ratio"),
    )


def _tables(tables: Iterable[Mapping[str, Any]]) -> tuple[PaperTable, ...]:
    return tuple(
        PaperTable(
            table["caption"],
            {method: PaperColumn(**column) for method, column in table["columns"].items()},
        )
        for table in tables
    )
