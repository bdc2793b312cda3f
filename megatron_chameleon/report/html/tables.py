"""A table as HTML. The script of the page makes its headings sort it."""

from __future__ import annotations

import base64
from collections.abc import Collection

from megatron_chameleon.report.csv_tables import csv_table
from megatron_chameleon.report.html.elements import Element, append, element
from megatron_chameleon.report.text_tables import Row, Table

BEST_SIGN = "★"
# Longer ones scroll in a box of their own, below headings that stay.
ROWS_OF_A_LONG_TABLE = 25


def table_element(table: Table, name: str, heading: str, said: Collection[str] = ()) -> Element:
    """A table with its notes and a link to its CSV.

    Args:
        table: what is shown.
        name: for its id and the file's name.
        heading: of the section; a table of the same title shows it once.
        said: sentences that stand elsewhere in the page, and are not repeated below the table.
    """
    hidden = "hidden-text" if table.title == heading else "shown"
    marked = [
        any(row[i].best for row in (*table.rows, *table.summary)) for i in range(len(table.header))
    ]
    grid = element(
        "table",
        element("caption", table.title, class_=hidden),
        element("thead", _headings(table, marked)),
        element("tbody", *(_row(row, marked) for row in table.rows)),
    )
    if table.summary:
        append(grid, element("tfoot", *(_row(row, marked) for row in table.summary)))
    is_long = len(table.rows) > ROWS_OF_A_LONG_TABLE
    box = element("div", grid, class_="scroll long" if is_long else "scroll")
    notes = [element("p", note, class_="note") for note in table.notes if note not in said]
    return element("div", box, _link(table, name), *notes, class_="table", id=f"table-{name}")


def _headings(table: Table, marked: list[bool]) -> Element:
    cells = (
        element("th", element("bdi", title), scope="col", **({"class_": "marked"} if mark else {}))
        for title, mark in zip(table.header, marked, strict=True)
    )
    return element("tr", *cells)


def _row(row: Row, marked: list[bool]) -> Element:
    name, *figures = row
    cells = [element("th", element("bdi", name.text), scope="row")]
    for cell, mark in zip(figures, marked[1:], strict=True):
        attributes = {"class_": "marked"} if mark else {}
        if not cell.best:
            cells.append(element("td", cell.text, **attributes))
            continue
        sign = element("span", BEST_SIGN, class_="sign", aria_hidden="true")
        spoken = element("span", " (best)", class_="hidden-text")
        cells.append(element("td", element("strong", cell.text), sign, spoken, **attributes))
    return element("tr", *cells)


def _link(table: Table, name: str) -> Element:
    """The CSV as a download that is in the page itself."""
    content = base64.b64encode(csv_table(table).encode("utf-8")).decode("ascii")
    link = element(
        "a",
        "CSV",
        href=f"data:text/csv;charset=utf-8;base64,{content}",
        download=f"{name}.csv",
        aria_label=f"{table.title} as a CSV file",
    )
    return element("p", f"{len(table.rows):,} rows, ", link, class_="csv")
