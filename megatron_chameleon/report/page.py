"""The report of a run: read, put into words, rendered, written and printed."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from megatron_chameleon.errors import UserError
from megatron_chameleon.report.csv_tables import csv_table
from megatron_chameleon.report.document import Report
from megatron_chameleon.report.markdown_page import markdown_page
from megatron_chameleon.report.merged import merge
from megatron_chameleon.report.names import one_line
from megatron_chameleon.report.report_files import write_report
from megatron_chameleon.report.run_folder import REPORT, RunFolder
from megatron_chameleon.report.text_tables import NOTE_WIDTH, terminal_table

PAGE_NAME = "report.html"
TABLES_NAME = "tables.md"
# A file for each table, for spreadsheets.
TABLES_FOLDER = "tables"
_MISSING_GLYPH = re.compile(r"Glyph (\d+) .*missing from font")


def make_report(*runs: Path, baseline: str | None = None, output: Path | None = None) -> Path:
    """Write the page, tables and pictures of the run folders ``runs``, and print the tables.

    Everything is read and drawn before the first file is written.

    Args:
        runs: at least one run folder; several are put together as one, each once.
        baseline: name of the evaluated base run that the others are compared with; None takes
            the one that was trained with uniform weights.
        output: the folder to write to; None takes 7-report of the first run folder.

    Returns:
        The folder that was written.

    Raises:
        UserError: if an artifact that a table needs is missing or damaged, if evaluations cannot
            be compared, or if matplotlib is not installed.
    """
    with _noting_signs() as lacking:
        report = settled_report(runs, baseline)
        files = rendered(report)
    place = runs[0] / REPORT if output is None else output
    write_report(place, files)
    _print(report, place)
    if lacking:
        print(f"No font of the PNG and PDF pictures has: {' '.join(lacking)}; the page shows them")
    print(f"All of it in one page: open {place / PAGE_NAME}", flush=True)
    return place


def settled_report(runs: tuple[Path, ...], baseline: str | None = None) -> Report:
    """What :func:`make_report` says of ``runs``, its figures laid out. Raises as that does."""
    figures = load_figures()
    from megatron_chameleon.report.sections import report_of

    runs = _distinct(runs)
    folder = _load(runs)
    report = report_of(folder, runs, _title(folder), baseline)
    for picture in report.pictures:
        figures.settle(picture.figure)
    return report


def rendered(report: Report) -> dict[str, bytes]:
    """Path below the report's folder -> content, for every file of the report."""
    figures = load_figures()
    from megatron_chameleon.report.html.page import html_page

    files: dict[str, bytes] = {}
    for picture in report.pictures:
        files[f"{picture.name}.png"] = figures.png(picture.figure)
        files[f"{picture.name}.pdf"] = figures.pdf(picture.figure)
    for name, table in report.named_tables():
        files[f"{TABLES_FOLDER}/{name}.csv"] = csv_table(table).encode("utf-8")
    files[TABLES_NAME] = markdown_page(report).encode("utf-8")
    files[PAGE_NAME] = html_page(report).encode("utf-8")
    return files


def _distinct(runs: tuple[Path, ...]) -> tuple[Path, ...]:
    """``runs`` without those that are an earlier one, by another way perhaps."""
    by_place: dict[str, Path] = {}
    for run in runs:
        by_place.setdefault(os.path.realpath(run), run)
    return tuple(by_place.values())


def _title(folder: RunFolder) -> str:
    """The folder's name; of several, as much of their paths as tells them apart."""
    names = folder.merged.roots.values() if folder.merged else [folder.root.resolve().name]
    return " + ".join(names)


def _load(runs: tuple[Path, ...]) -> RunFolder:
    if not runs:
        raise UserError("no run folder given; give at least one")
    return merge([RunFolder.load(run) for run in runs])


@contextlib.contextmanager
def _noting_signs() -> Iterator[list[str]]:
    """A block that gathers the signs that matplotlib has no font for, and tells nothing of them.

    matplotlib warns of each again wherever it is drawn. All other warnings go their way.
    """
    lacking: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lacking
    for warning in caught:
        found = _MISSING_GLYPH.match(str(warning.message))
        if found is None:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif chr(int(found[1])) not in lacking:
            lacking.append(chr(int(found[1])))


def _print(report: Report, place: Path) -> None:
    print("\n\n\n".join(map(terminal_table, report.tables)), end="\n\n")
    shown = {note for table in report.tables for note in table.notes}
    for sentence in (*report.findings, *(c for c in report.caveats if c not in shown)):
        print(textwrap.fill(one_line(sentence), NOTE_WIDTH), end="\n\n")
    for picture in report.pictures:
        print(f"{picture.title}: {place / picture.name}.png and .pdf")
    for picture in report.absent:
        print(f"{picture.title}: not drawn: {picture.missing}")
    print(f"These tables in Markdown: {place / TABLES_NAME}, as CSV: {place / TABLES_FOLDER}")


def load_figures() -> ModuleType:
    """The module that needs matplotlib, which is an extra."""
    try:
        from megatron_chameleon.report import figures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise UserError(
            "the report's pictures need matplotlib, which is not installed; "
            "pip install 'megatron_chameleon[plots]'"
        ) from error
    return figures
