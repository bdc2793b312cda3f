from __future__ import annotations

import csv
import io

import pytest

from megatron_chameleon.report.csv_tables import csv_table, csv_text
from megatron_chameleon.report.text_tables import Cell, Table


def table_of(*columns, summary=()):
    rows = tuple(tuple(map(Cell, row)) for row in zip(*columns, strict=True))
    header = ("domain", *(f"c{i}" for i in range(1, len(columns))))
    return Table("Title", header, rows, tuple(tuple(map(Cell, row)) for row in summary))


def read(text):
    return list(csv.reader(io.StringIO(text)))


def test_every_row_is_there_and_the_summary_last():
    table = table_of(["a", "b, c"], ["1.25", "2"], summary=[["average", "1.62"]])
    assert read(csv_table(table)) == [
        ["domain", "c1"],
        ["a", "1.25"],
        ["b, c", "2"],
        ["average", "1.62"],
    ]


def test_figures_are_plain_numbers_and_what_is_missing_is_empty():
    table = table_of(["a", "b", "c"], ["1,234,567", "-", "1.2e+13"])
    assert [row[1] for row in read(csv_table(table))[1:]] == ["1234567", "", "1.2e+13"]


def test_a_figure_with_its_error_takes_two_columns():
    table = table_of(["a", "b", "c"], ["-0.1234 ± 0.0100", "2.5", "-"])
    assert read(csv_table(table)) == [
        ["domain", "c1", "c1 ±"],
        ["a", "-0.1234", "0.0100"],
        ["b", "2.5", ""],
        ["c", "", ""],
    ]


def test_a_range_takes_two_columns():
    table = table_of(["a", "b", "c"], ["0.1 to 0.2", "3", "-"])
    assert read(csv_table(table)) == [
        ["domain", "c1 from", "c1 to"],
        ["a", "0.1", "0.2"],
        ["b", "3", "3"],
        ["c", "", ""],
    ]


def test_words_with_to_between_them_are_no_range():
    table = table_of(["text to text"], ["more to less"])
    assert read(csv_table(table))[1] == ["text to text", "more to less"]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "=1"])
def test_nothing_is_a_formula(name):
    for line in read(csv_table(table_of([name], ["1"]))) + read(csv_text([[name, 1]])):
        assert line[0] in ("domain", f"'{name}")


@pytest.mark.parametrize("name", ["=x", "@x"])
def test_headings_are_no_formulas(name):
    table = Table("Title", ("domain", name), ((Cell("a"), Cell("1")),))
    assert read(csv_table(table))[0] == ["domain", f"'{name}"]


@pytest.mark.parametrize("figure", ["-0.25", "+1.5", "-1e-05", "+0.20%", "-3"])
def test_numbers_with_a_sign_stay_numbers(figure):
    assert read(csv_table(table_of(["a"], [figure])))[1] == ["a", figure]


def test_a_line_break_in_a_name_does_not_break_the_line():
    text = csv_table(table_of(["a\nb\r\nc"], ["1"]))
    assert text == "domain,c1\na b c,1\n"
