"""Tables as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re

import pandas as pd
import pytest

from megatron_chameleon.report.tables import Table, csv_table, csv_text, markdown


@pytest.mark.parametrize(
    "name",
    ["a|b", "<script>alert(1)</script>", "[x](http://y)", "**x**", "a\\|b", "`x` &lt; $x$"],
)
def test_markdown_escapes_names(name):
    escaped = markdown(name)
    assert re.search(r"(?<!\\)(\\\\)*[|<>\[\]*`&$]", escaped) is None
    assert re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", escaped) == name


def table_of(*columns):
    header = ("domain", *(f"c{i}" for i in range(1, len(columns))))
    return Table.of("Title", header, zip(*columns, strict=True))


def read(text):
    return list(csv.reader(io.StringIO(text)))


def test_csv_has_plain_numbers_and_two_columns_for_errors_and_ranges():
    plain, pairs = ["1,234,567", "-", "1.2e+13"], ["-0.1234 ± 0.0100", "2.5", "-"]
    ranges = ["0.1 to 0.2", "3", "-"]
    assert read(csv_table(table_of(["a", "b", "c\x1b\nd"], plain, pairs, ranges))) == [
        ["domain", "c1", "c2", "c2 ±", "c3 from", "c3 to"],
        ["a", "1234567", "-0.1234", "0.0100", "0.1", "0.2"],
        ["b", "", "2.5", "", "3", "3"],
        ["c\N{REPLACEMENT CHARACTER} d", "1.2e+13", "", "", "", ""],
    ]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"])
def test_csv_has_no_formulas(name):
    frame = pd.DataFrame({"domain": [name]})
    for line in (*read(csv_table(table_of([name], ["1"]))), *read(csv_text(frame))):
        assert line[0] in ("domain", f"'{name}")
