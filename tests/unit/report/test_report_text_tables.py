from __future__ import annotations

import re

import pytest

from megatron_chameleon.report.names import display_width, markdown, one_line, shortened
from megatron_chameleon.report.text_tables import (
    NAME_WIDTH,
    Cell,
    Table,
    markdown_table,
    terminal_table,
)


def table(**changes):
    values = {
        "title": "Title",
        "header": ("domain", "first value", "second"),
        "rows": (
            (Cell("a|b_<x>"), Cell("1.25", best=True), Cell("10.50")),
            (Cell("日本語"), Cell("13.00"), Cell("2.00", best=True)),
        ),
        "summary": ((Cell("average"), Cell("7.12"), Cell("6.25", best=True)),),
        "notes": ("A note.",),
    }
    return Table(**{**values, **changes})


def unescaped_cells(line: str) -> list[str]:
    """What a Markdown reader sees in the cells of a row."""
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", cell.strip()) for cell in cells]


def test_terminal_columns_end_at_the_same_place():
    lines = terminal_table(table()).splitlines()
    rules = [i for i, line in enumerate(lines) if set(line) == {"-"}]
    body = [*lines[rules[0] + 1 : rules[1]], lines[rules[1] + 1]]
    # Widths count the columns of a terminal: a Japanese sign takes two.
    points = [[i for i, sign in enumerate(line) if sign == "."] for line in body]
    shifts = [display_width(line) - len(line) for line in body]
    ends = [[p + shift for p in ps] for ps, shift in zip(points, shifts, strict=True)]
    assert ends[0] == ends[1] == ends[2]


def test_terminal_marks_only_the_best():
    text = terminal_table(table())
    assert re.findall(r"(\S+)\*", text) == ["1.25", "2.00", "6.25"]


def test_a_wide_heading_is_broken_at_its_blanks():
    lines = terminal_table(table()).splitlines()
    assert lines[2].split() == ["first"]
    assert lines[3].split() == ["domain", "value", "second"]


def test_a_table_without_rows_is_still_a_table():
    text = terminal_table(table(rows=(), summary=(), notes=()))
    assert "domain" in text
    assert "first" in text


def test_a_very_long_name_is_shortened_in_the_terminal_alone():
    name = "crawl " + "n" * 200 + " 2024"
    long = table(rows=((Cell(name), Cell("1.25"), Cell("1" * 80)),))
    lines = terminal_table(long).splitlines()
    (row,) = [line for line in lines if "1.25" in line]
    assert row.index("1.25") < NAME_WIDTH + 20
    assert row.startswith("crawl nnn")
    assert "n 2024 " in row
    assert row.endswith("1" * 80)
    assert name in markdown_table(long)


def test_markdown_has_the_same_content():
    lines = markdown_table(table()).splitlines()
    assert lines[0] == "## Title"
    assert unescaped_cells(lines[2]) == ["domain", "first value", "second"]
    assert lines[3] == "| --- | ---: | ---: |"
    assert unescaped_cells(lines[4]) == ["a|b_<x>", "**1.25**", "10.50"]
    assert unescaped_cells(lines[5]) == ["日本語", "13.00", "**2.00**"]
    assert unescaped_cells(lines[6]) == ["average", "7.12", "**6.25**"]
    assert lines[-1] == "A note."


@pytest.mark.parametrize(
    "name",
    ["a|b", "<script>alert(1)</script>", "[x](http://y)", "**x**", "a\\|b", "`x`", "&lt;", "$x$"],
)
def test_markdown_shows_a_name_as_it_is(name):
    escaped = markdown(name)
    assert re.search(r"(?<!\\)(\\\\)*[|<>\[\]*`&$]", escaped) is None
    assert re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", escaped) == name


def test_a_name_cannot_break_the_line_or_steer_the_terminal():
    assert one_line("a\nb\tc") == "a b c"
    assert "\x1b" not in one_line("\x1b[31mred")
    assert one_line("café 日本") == "café 日本"


def test_a_long_name_keeps_both_ends():
    assert shortened("short", 10) == "short"
    first, second = (shortened("common crawl of the year " + year, 16) for year in ("2024", "2025"))
    assert len(first) == len(second) == 16
    assert first.startswith("common")
    assert first.endswith("2024")
    assert first != second
