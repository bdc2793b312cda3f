"""A head-to-head on disk: text, Markdown, CSV, JSON and a picture, and a record of where it ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.files import read_json, replacing, write_json
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.csv_tables import csv_text
from megatron_chameleon.report.head_to_head.compare import (
    Contestant,
    HeadToHead,
    Selection,
    head_to_head,
)
from megatron_chameleon.report.head_to_head.machine import made_on
from megatron_chameleon.report.head_to_head.statistics import Array, Spread
from megatron_chameleon.report.head_to_head.tables import comparison_table, domain_table
from megatron_chameleon.report.names import markdown
from megatron_chameleon.report.page import load_figures
from megatron_chameleon.report.report_files import write_text
from megatron_chameleon.report.run_folder import REPORT, RunFolder
from megatron_chameleon.report.text_tables import markdown_table, terminal_table

PAGE_TITLE = "Methods compared"


@dataclasses.dataclass(frozen=True)
class Record:
    """Where a comparison is recorded, and what it cannot say of itself."""

    path: Path
    command: str
    wall_seconds: float | None

    @classmethod
    def asked_for(
        cls, path: Path | None, command: str | None, wall_seconds: float | None
    ) -> Record | None:
        """The record that the options ask for, if they do. Raises UserError for half of one."""
        if path is None:
            return None
        if command is None:
            raise UserError("--record also needs --command, the line that made the comparison")
        if path.suffix != ".json":
            raise UserError(f"--record {path}: give a name that ends in .json")
        return cls(path, command, wall_seconds)


def report_head_to_head(
    run: Path, selection: Selection, name: str, record: Record | None = None
) -> HeadToHead:
    """Compare what ``run`` holds, print the tables, and write them to its 7-report.

    Args:
        run: the run folder.
        selection: the mixtures and seeds.
        name: of the files, without their suffixes.
        record: where the comparison is to be recorded beside that.

    Raises:
        UserError: if something is missing or cannot be compared, or matplotlib is not installed.
    """
    figures = load_figures()
    from megatron_chameleon.report.head_to_head.figure import head_to_head_figure

    stem = run / REPORT / name
    _require_own(stem.with_suffix(".json"), (".png", ".txt", ".md", ".csv"))
    if record is not None:
        _require_own(record.path, (".md",))
    compared = head_to_head(RunFolder.load(run), selection)
    tables = [comparison_table(compared), domain_table(compared)]
    text = "\n\n\n".join(map(terminal_table, tables)) + "\n"
    body = as_json(compared)
    with replacing(stem.with_suffix(".png")) as temporary:
        temporary.write_bytes(figures.png(head_to_head_figure(compared)))
    page = "\n\n".join(map(markdown_table, tables))
    write_text(stem.with_suffix(".txt"), text)
    write_text(
        stem.with_suffix(".md"),
        f"# {PAGE_TITLE}\n\n{page}\n\n![Average perplexity against cost]({name}.png)\n",
    )
    write_text(stem.with_suffix(".csv"), as_csv(compared))
    write_json(stem.with_suffix(".json"), body)
    print(text)
    if record is not None:
        write_record_of(compared, record, body, page)
    print(f"written to {stem}.txt, .md, .csv, .json and .png", flush=True)
    return compared


def _require_own(path: Path, suffixes: Sequence[str]) -> None:
    """Check that what is at ``path``, and there with ``suffixes``, is an earlier comparison.

    Raises:
        UserError: if it is something else, which would be lost.
    """
    if path.is_file() and read_json(path, "choose another name").keys() >= {"seeds", "mixtures"}:
        return
    require_new([path, *map(path.with_suffix, suffixes)], "choose another name")


def write_record_of(compared: HeadToHead, record: Record, body: dict[str, Any], page: str) -> None:
    """Write the JSON and the Markdown that say when, where and by which command, and the tables."""
    where = made_on(compared)
    took = {} if record.wall_seconds is None else {"wall_seconds": record.wall_seconds}
    write_json(record.path, {**where, "command": record.command, **took, **body})
    machine = where["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    minutes = (
        "" if record.wall_seconds is None else f", in {record.wall_seconds / 60:.0f} minutes in all"
    )
    lines = [
        f"# {PAGE_TITLE}",
        "",
        f"Made on {where['date']} by `{record.command}`{minutes}, on {machine['device']} "
        f"({markdown(machine['processor'])}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}), with {versions}; commit "
        f"{', '.join(where['git_commits']) or 'unknown'}.",
        "",
        page,
    ]
    write_text(record.path.with_suffix(".md"), "\n".join(lines) + "\n")
    print(f"recorded in {record.path} and {record.path.with_suffix('.md')}")


def as_json(compared: HeadToHead) -> dict[str, Any]:
    """Every figure of the comparison, unrounded."""
    found = compared.spread
    return {
        "seeds": list(compared.selection.seeds),
        "domains": list(compared.domains),
        "baseline": compared.baseline.name,
        "reference": None if compared.reference is None else compared.reference.name,
        "spread": None if found is None else _spread(found),
        "base_model": {
            "parameters": compared.contestants[0].runs[0].parameters,
            "steps": compared.contestants[0].runs[0].step,
            "tokens": compared.contestants[0].runs[0].tokens,
        },
        "protocol": dataclasses.asdict(compared.contestants[0].results[0].protocol),
        "mixtures": {c.name: _details(compared, c) for c in compared},
    }


def _spread(found: Spread) -> dict[str, Any]:
    return {
        "between_mixtures": found.mixtures,
        "between_seeds": found.seeds,
        "ratio": found.ratio if found.seeds else None,
        "is_told_apart": found.is_told_apart,
    }


def _details(compared: HeadToHead, contestant: Contestant) -> dict[str, Any]:
    i = compared.contestants.index(contestant)
    averages, gap = compared.averages[i], compared.difference(contestant, compared.baseline)
    multiples = compared.multiples(contestant)

    def by_domain(figures: Array) -> dict[str, float]:
        return dict(zip(compared.domains, map(float, figures), strict=True))

    return {
        "label": contestant.label,
        "same_models_as": contestant.twin_of,
        "weights": contestant.mixture.weights,
        "average_perplexity": averages.mean(),
        "standard_deviation": averages.std(ddof=1),
        "less_baseline": gap.mean,
        "standard_error": gap.standard_error,
        "half_width_95": gap.half_width,
        "domains_better": compared.domains_better(contestant),
        **contestant.amounts,
        **{f"{unit}_by_reference": multiple for unit, multiple in multiples.items()},
        "cost_made_of": list(contestant.paid.parts),
        "cost_missing": list(contestant.paid.missing),
        "perplexity": {
            f"seed {seed}": by_domain(compared.perplexities[i, s])
            for s, seed in enumerate(compared.selection.seeds)
        },
        "mean_perplexity": by_domain(compared.perplexities[i].mean(axis=0)),
        "perplexity_standard_deviation": by_domain(compared.perplexities[i].std(axis=0, ddof=1)),
    }


def as_csv(compared: HeadToHead) -> str:
    """A line per mixture: its figures, the average of each seed, then weights by domain."""
    lines = []
    for i, c in enumerate(compared):
        details = _details(compared, c)
        line: dict[str, float | int | str] = {"mixture": c.name}
        line |= {k: v for k, v in details.items() if isinstance(v, float | int | str)}
        seeds = zip(compared.selection.seeds, compared.averages[i], strict=True)
        line |= {f"average_perplexity_seed_{seed}": average for seed, average in seeds}
        line |= {f"weight:{d}": c.mixture.weights.get(d, 0.0) for d in compared.domains}
        lines.append(line)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    return csv_text([columns, *([line.get(column, "") for column in columns] for line in lines)])
