"""Tables as CSV: a column for each figure, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from megatron_chameleon.report.names import one_line
from megatron_chameleon.report.text_tables import MISSING, Cell, Table

# A spreadsheet takes a cell that begins so for a formula, unless it is a number.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?|[+-]?inf|nan", re.IGNORECASE)
# What stands between the two figures of a cell -> what is added to the heading of each.
_RANGE = " to "
_PAIRS = {" ± ": ("", " ±"), _RANGE: (" from", " to")}


def csv_text(lines: Iterable[Sequence[object]]) -> str:
    """``lines`` as CSV with a line break of one sign; text that looks like a formula gets a "'"."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(map(_harmless, lines))
    return stream.getvalue()


def csv_table(table: Table) -> str:
    """The heading, the rows and the summary of ``table``.

    Cells like '1.20 ± 0.03' and '0.1 to 0.2' take two columns; thousands have no comma, and what
    is missing is empty.
    """
    rows = (*table.rows, *table.summary)
    first, *titles = map(one_line, table.header)
    columns = [[first, *(one_line(row[0].text) for row in rows)]]
    for i, title in enumerate(titles, start=1):
        columns += _columns(title, [row[i] for row in rows])
    return csv_text(zip(*columns, strict=True))


def _columns(title: str, cells: list[Cell]) -> list[list[str]]:
    """One column of texts, or two where the cells have two figures."""
    texts = [one_line(cell.text) for cell in cells]
    for sign, added in _PAIRS.items():
        parted = [text.split(sign) for text in texts]
        pairs = [parts for parts in parted if len(parts) == 2]
        if pairs and all(_NUMBER.fullmatch(part) for parts in pairs for part in parts):
            if sign == _RANGE:  # one figure alone is both of its ends
                parted = [parts * (3 - len(parts)) for parts in parted]
            return [
                [title + name, *(_plain(parts[i]) if i < len(parts) else "" for parts in parted)]
                for i, name in enumerate(added)
            ]
    return [[title, *map(_plain, texts)]]


def _plain(text: str) -> str:
    if text == MISSING:
        return ""
    return text.replace(",", "") if _NUMBER.fullmatch(text) else text


def _harmless(line: Sequence[object]) -> list[object]:
    return [
        f"'{cell}"
        if isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
        else cell
        for cell in line
    ]
