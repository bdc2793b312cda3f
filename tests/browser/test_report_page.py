"""Test the report's page in a browser: it loads no other files, sorts, scrolls and is readable."""

from __future__ import annotations

import re

import pytest


def luminance(color: str) -> float:
    """Relative luminance of a color 'rgb(r, g, b)', as defined by WCAG 2.2."""
    values = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def column(page, table: str, index: int) -> list[str]:
    """The texts of one column in the table's body."""
    cells = page.locator(f"#{table} tbody tr > :nth-child({index + 1})")
    return [text.split("★")[0] for text in cells.all_text_contents()]


def test_the_page_loads_nothing_else_and_logs_nothing(open_page, report):
    page, log = open_page()
    page.wait_for_load_state("networkidle")
    outside = [url for url in log.requests if not url.startswith("data:image/png")]
    assert outside == [report.as_uri()]
    assert log.problems == []
    assert page.locator("section").count() == 13
    assert page.locator("h1").inner_text() == "run"
    # No domain name was interpreted as HTML.
    assert page.locator("img, main script, [onmouseover], [onerror], [onload]").count() == 0


def test_injected_scripts_do_not_run(open_page):
    page, log = open_page()
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.leaked = true";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<p onclick='leaked = true' id=trap>x</p>");
          document.getElementById("trap").click();
        }"""
    )
    assert page.evaluate("window.leaked") is None
    assert any("Content Security Policy" in problem for problem in log.problems)


def test_a_table_is_sorted_from_the_keyboard(open_page):
    page, _ = open_page(color_scheme="dark")
    headings = page.locator("#table-held-out-perplexity thead th")
    headings.nth(0).locator("button").focus()
    page.keyboard.press("Enter")
    assert headings.nth(0).get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert headings.nth(0).get_attribute("aria-sort") == "none"
    assert headings.nth(1).get_attribute("aria-sort") == "ascending"
    values = [float(text) for text in column(page, "table-held-out-perplexity", 1)]
    assert values == sorted(values)


ORDERED = [
    ["-0.5000 ± 0.0100", "-0.0100 ± 0.2000", "+0.0100", "+1.5 ± 0.1", "-"],
    ["0.1 to 0.2", "0.1 to 0.3", "0.2 to 0.25", "-"],
    ["9", "1,234", "12,345", "1.2e+13", "-"],
    ["0.5x", "2.3x", "12.3x", "-"],
    ["12.30", "1.234e+04", "inf", "nan"],
    ["+0.1000 ± 0.2", "+2.5", "+nan ± nan"],
    ["-3.10%", "-0.20% to +0.30%", "+12.00%", ""],
    ["2 of 7", "10 of 7", "unknown"],
    ["finished", "interrupted", "running"],
]


@pytest.fixture(scope="module")
def sorting_page(browser, tmp_path_factory):
    """A page with one table, whose columns are the lists of ``ORDERED`` in reverse order."""
    from megatron_chameleon.report.page import Report, Section, html_page
    from megatron_chameleon.report.tables import Table

    most = max(map(len, ORDERED))
    shuffled = [(values + [values[-1]] * (most - len(values)))[::-1] for values in ORDERED]
    rows = [[f"row {i}", *(values[i] for values in shuffled)] for i in range(most)]
    header = ("name", *(f"c{i}" for i in range(len(ORDERED))))
    section = Section("s", "Sorted", "An introduction.", tables=[Table.of("Title", header, rows)])
    path = tmp_path_factory.mktemp("sorting") / "report.html"
    path.write_text(html_page(Report("t", (), (), (section,))), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    yield page
    page.close()


@pytest.mark.parametrize("index", range(len(ORDERED)))
def test_every_format_is_sorted_with_missing_values_last(sorting_page, index):
    values = ORDERED[index]
    is_absent = values[-1] in ("-", "nan", "+nan ± nan", "", "unknown")
    button = sorting_page.locator("#table-title thead th").nth(index + 1).locator("button")
    button.click()
    assert list(dict.fromkeys(column(sorting_page, "table-title", index + 1))) == values
    button.click()
    present = values[:-1] if is_absent else values
    expected = [*present[::-1], *(values[-1:] if is_absent else [])]
    assert list(dict.fromkeys(column(sorting_page, "table-title", index + 1))) == expected


def test_the_theme_is_chosen_with_a_button_and_remembered(open_page):
    page, _ = open_page(color_scheme="light")

    def paper():
        return luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert paper() > 0.9
    button = page.get_by_role("button", name="Show in dark colours")
    button.click()
    assert paper() < 0.05
    assert page.get_by_role("button", name="Show in light colours").inner_text() == "Light"
    page.reload()
    assert paper() < 0.05
    page.get_by_role("button", name="Show in light colours").click()
    assert paper() > 0.9


def test_a_table_is_saved_as_csv(open_page, report):
    page, _ = open_page()
    with page.expect_download() as download:
        page.get_by_role("link", name="Held-out perplexity as a CSV file").click()
    assert download.value.suggested_filename == "held-out-perplexity.csv"
    saved = download.value.path().read_bytes()
    assert saved == (report.parent / "tables/held-out-perplexity.csv").read_bytes()
