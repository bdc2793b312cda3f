"""A table as data, and the two forms in which it is shown: a terminal's and Markdown's."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from megatron_chameleon.report.names import display_width, markdown, one_line, shortened

MISSING = "-"
GAP = "  "
NOTE_WIDTH = 80
# The figures of a terminal's table stay near its names.
NAME_WIDTH = 60


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text of a cell; ``best`` marks the best value of its row."""

    text: str = MISSING
    best: bool = False


Row = tuple[Cell, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table. The first column holds names, the others figures.

    ``summary`` are the rows below the line; ``notes`` are the sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    summary: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


def terminal_table(table: Table) -> str:
    """Aligned columns under a title; '*' after the best of a row. Very long names are shortened."""
    body = [_terminal_row(table, row) for row in (*table.rows, *table.summary)]
    columns = list(zip(*body, strict=True)) if body else [()] * len(table.header)
    headings = [
        _wrapped(title, max(map(display_width, column), default=0))
        for title, column in zip(table.header, columns, strict=True)
    ]
    height = max(map(len, headings))
    head = list(zip(*([""] * (height - len(lines)) + lines for lines in headings), strict=True))
    widths = [
        max(map(display_width, (*column, *lines)))
        for column, lines in zip(columns, headings, strict=True)
    ]
    rule = "-" * (sum(widths) + len(GAP) * (len(widths) - 1))
    lines = [_aligned(row, widths) for row in (*head, *body)]
    lines.insert(height, rule)
    if table.summary:
        lines.insert(len(lines) - len(table.summary), rule)
    notes = [textwrap.fill(one_line(note), max(len(rule), NOTE_WIDTH)) for note in table.notes]
    return "\n".join([one_line(table.title), "", *lines, *([""] if notes else []), *notes])


def markdown_table(table: Table, level: int = 2) -> str:
    """A heading of ``level`` and a GitHub-flavoured Markdown table; the best of a row is bold."""
    lines = [f"{'#' * level} {markdown(table.title)}", ""]
    lines.append(_markdown_row([markdown(title) for title in table.header]))
    lines.append(_markdown_row(["---", *["---:"] * (len(table.header) - 1)]))
    for row in (*table.rows, *table.summary):
        texts = [f"**{markdown(c.text)}**" if c.best else markdown(c.text) for c in row]
        lines.append(_markdown_row(texts))
    for note in table.notes:
        lines += ["", markdown(note)]
    return "\n".join(lines)


def _terminal_row(table: Table, row: Row) -> list[str]:
    """Texts of ``row``; where a column has marks, a blank keeps the others' digits aligned."""
    has_marks = [
        any(other[i].best for other in (*table.rows, *table.summary)) for i in range(len(row))
    ]
    marks = ["*" if cell.best else " " if has_marks[i] else "" for i, cell in enumerate(row)]
    texts = [shortened(row[0].text, NAME_WIDTH), *(one_line(cell.text) for cell in row[1:])]
    return [text + mark for text, mark in zip(texts, marks, strict=True)]


def _wrapped(title: str, width: int) -> list[str]:
    """A heading on several lines rather than a column wider than its figures."""
    title = one_line(title)
    longest_word = max(map(len, title.split()), default=1)
    return textwrap.wrap(title, max(width, longest_word), break_long_words=False) or [""]


def _aligned(row: Sequence[str], widths: list[int]) -> str:
    blanks = [" " * (width - display_width(text)) for text, width in zip(row, widths, strict=True)]
    first, *others = zip(row, blanks, strict=True)
    return GAP.join([first[0] + first[1], *(blank + text for text, blank in others)]).rstrip()


def _markdown_row(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"
