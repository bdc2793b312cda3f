"""The page as text: whole, harmless whatever things are called, and the same each time."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re

import pytest

from megatron_chameleon.report.page import html_page, load_report
from tests.unit.report.html_reading import Node, read_html
from tests.unit.report.page_samples import HOSTILE_NAMES, write_full_folder

SECTIONS = [
    "found",
    "result",
    "loss",
    "bits-per-byte",
    "weights",
    "downstream",
    "cost",
    "curves",
    "tokens",
    "affinity",
    "stability",
    "windows",
    "origins",
]
FIGURES = ["weights", "loss", "affinity", "stability", "windows"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_full_folder(tmp_path_factory.mktemp("page") / "<b>run & co", HOSTILE_NAMES)


@pytest.fixture(scope="module")
def report(root):
    return load_report((root,))


@pytest.fixture(scope="module")
def text(report):
    return html_page(report)


@pytest.fixture(scope="module")
def page(text):
    return read_html(text)


def by_id(page: Node, name: str) -> Node:
    (found,) = [node for node in page.everything() if node.attributes.get("id") == name]
    return found


def shown(name: str) -> str:
    return re.sub("[\x1b\u202e]", "\N{REPLACEMENT CHARACTER}", name)


def test_the_sections_come_in_order_and_the_contents_lead_to_them(page):
    assert [node.attributes["id"] for node in page.all("section")] == SECTIONS
    (contents,) = page.all("nav")
    assert [link.attributes["href"] for link in contents.all("a")] == [f"#{s}" for s in SECTIONS]
    headings = [node.all("h2")[0].text for node in page.all("section")]
    assert [link.text for link in contents.all("a")] == headings


def test_the_verdict_is_at_the_top_and_not_repeated(page, report):
    (verdict,) = report.findings
    assert "Chameleon has an average perplexity of" in verdict
    assert verdict in by_id(page, "found").text
    assert page.text.count(verdict) == 1


def test_every_id_is_there_once_and_every_reference_has_one(page):
    ids = [node.attributes["id"] for node in page.everything() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    values = [value for node in page.everything() for value in node.attributes.values()]
    pointed = {v[1:] for v in values if re.fullmatch("#[a-z][^;]*", v)}
    pointed |= {found for value in values for found in re.findall(r"url\(#(.*?)\)", value)}
    for node in page.everything():
        for key in ("aria-labelledby", "aria-describedby"):
            pointed |= set(node.attributes.get(key, "").split())
    assert len(pointed) > 30
    assert pointed <= set(ids)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_are_shown_as_they_are(page, name):
    first_cells = [row.all("th")[0].text for row in by_id(page, "result").all("tr")]
    assert first_cells.count(shown(name)) == 1
    ticks = [node.text for node in by_id(page, "figure-affinity").all("text")]
    assert any(tick[:6] == shown(name)[:6] for tick in ticks)


def test_nothing_runs_but_the_script_of_the_page(page):
    for node in page.everything():
        assert node.tag not in ("iframe", "object", "embed", "link", "base", "form", "img")
        assert not [key for key in node.attributes if key.startswith("on")], node
    (script,) = page.all("script")
    (style,) = page.all("style")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policies = [n for n in page.all("meta") if "http-equiv" in n.attributes]
    assert [n.attributes["http-equiv"] for n in policies] == ["Content-Security-Policy"]
    rules = policies[0].attributes["content"].split("; ")
    assert rules[0] == "default-src 'none'"
    assert f"script-src 'sha256-{digest}'" in rules
    assert "img-src data:" in rules
    assert "url(" not in style.text
    assert "@import" not in style.text


def test_nothing_is_fetched(page):
    for node in page.everything():
        for key, value in node.attributes.items():
            if key in ("href", "src", "srcset", "action", "data", "xlink:href", "poster"):
                assert value.startswith(("#", "data:image/png;base64,", "data:text/csv")), value
            assert not re.match(r"\s*(https?|javascript|file):", value), (node.tag, key, value)
            assert not re.search(r"url\((?!#)", value)


def test_the_page_has_a_title_a_language_and_fits_a_phone(page):
    assert page.attributes["lang"] == "en"
    (title, *others) = page.all("title")
    assert title.text == "<b>run & co"
    assert [other.attributes["id"] for other in others] == [f"figure-{n}-title" for n in FIGURES]
    assert page.all("h1")[0].text == "<b>run & co"
    assert any(
        node.attributes.get("name") == "viewport"
        and node.attributes["content"] == "width=device-width, initial-scale=1"
        for node in page.all("meta")
    )


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_a_title_a_description_and_a_caption(page, report, name):
    figure = by_id(page, f"figure-{name}")
    (svg,) = figure.all("svg")
    (picture,) = [p for p in report.pictures if p.name == name]
    assert svg.attributes["role"] == "img"
    assert by_id(page, svg.attributes["aria-labelledby"]).text == picture.title
    assert by_id(page, svg.attributes["aria-describedby"]).text == shown(picture.description)
    assert re.search(r"\d", picture.description)
    assert len(picture.description) > 80
    assert figure.all("figcaption")[0].text == f"{picture.title}. {picture.caption}"


def test_tables_say_what_their_headings_are_of(page, report):
    tables = page.all("table")
    assert len(tables) == len(report.tables)
    for drawn, table in zip(tables, report.tables, strict=True):
        assert drawn.all("caption")[0].text == table.title
        assert [h.attributes["scope"] for h in drawn.all("thead")[0].all("th")] == ["col"] * len(
            table.header
        )
        body = drawn.all("tbody")[0].all("tr")
        assert len(body) == len(table.rows)
        for row in (*body, *(r for foot in drawn.all("tfoot") for r in foot.all("tr"))):
            assert row.children[0].attributes["scope"] == "row"
            assert len(row.children) == len(table.header)


def test_the_best_of_a_row_has_a_sign(page):
    (row,) = [r for r in by_id(page, "result").all("tr") if r.text.startswith("average")]
    (best,) = row.all("strong")
    values = [float(cell.text.split("★")[0]) for cell in row.all("td")[-2:]]
    assert float(best.text) == min(values)
    (cell,) = [cell for cell in row.all("td") if "★" in cell.text]
    assert cell.text == f"{best.text}★ (best)"


def test_the_csv_of_a_table_is_in_the_page(page):
    (link,) = by_id(page, "table-held-out-perplexity").all("a")
    assert link.attributes["download"] == "held-out-perplexity.csv"
    encoded = link.attributes["href"].removeprefix("data:text/csv;charset=utf-8;base64,")
    lines = list(csv.reader(io.StringIO(base64.b64decode(encoded).decode("utf-8"))))
    assert lines[0][0] == "domain"
    assert "'=cmd|' /C calc'!A0" in [line[0] for line in lines]


def test_equal_data_give_equal_pages(root, text):
    assert html_page(load_report((root,))) == text


def test_the_page_is_small(text):
    assert 50_000 < len(text.encode()) < 600_000


def test_browsers_that_do_not_know_light_dark_have_the_light_colours(page):
    (style,) = page.all("style")
    plain, _, both = style.text.partition("@supports (color: light-dark(#000, #fff)) {")
    assert "light-dark(" not in plain.split("*/", 1)[1].split("/*")[0]
    light = dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6});", plain))
    pairs = re.findall(r"(--[a-z0-9-]+): light-dark\((#[0-9a-f]{6}), #[0-9a-f]{6}\);", both)
    assert light == dict(pairs)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", both)) - {"--width"}
    assert used
    assert used <= set(light)
