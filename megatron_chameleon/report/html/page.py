"""The page: what was found, the sections, and where it comes from."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from megatron_chameleon.report.document import Picture, Report, Section
from megatron_chameleon.report.html.elements import Element, document, element, raw
from megatron_chameleon.report.html.svg import svg_element
from megatron_chameleon.report.html.tables import BEST_SIGN, table_element
from megatron_chameleon.report.text_tables import Table

FOUND, FOUND_HEADING = "found", "What was found"
# The script is known by its hash, so that no other could run even if one got in.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def html_page(report: Report) -> str:
    """The whole page as text; equal reports give equal pages."""
    names = {id(table): name for name, table in report.named_tables()}
    sections = [_section(section, names, report) for section in report.sections]
    body = element(
        "body",
        element("a", "Skip to the report", href=f"#{FOUND}", class_="skip"),
        element("header", element("h1", element("bdi", report.title)), _theme_button()),
        _contents(report),
        element("main", _found(report), *sections),
    )
    return document(element("html", _head(report), body, lang="en"))


def _head(report: Report) -> Element:
    script = _file("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = element("meta", content=POLICY.format(digest=digest))
    policy.attrib["http-equiv"] = "Content-Security-Policy"
    return element(
        "head",
        element("meta", charset="utf-8"),
        policy,
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", report.title),
        raw("style", _file("style.css")),
        raw("script", script),
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _theme_button() -> Element:
    """Shown by the script, without which it would do nothing."""
    return element("button", "Dark", type="button", id="theme", hidden="")


def _contents(report: Report) -> Element:
    entries = [(FOUND, FOUND_HEADING), *((s.name, s.heading) for s in report.sections)]
    links = (element("li", element("a", text, href=f"#{name}")) for name, text in entries)
    return element("nav", element("ol", *links), aria_label="Contents")


def _found(report: Report) -> Element:
    parts: list[Element] = []
    for sentences, class_ in ((report.findings, "findings"), (report.caveats, "caveats")):
        if sentences:
            parts.append(element("ul", *(element("li", s) for s in sentences), class_=class_))
    return _framed(FOUND, FOUND_HEADING, *parts)


def _section(section: Section, names: dict[int, str], report: Report) -> Element:
    said = {*report.findings, *report.caveats}
    tables = [
        table_element(table, names[id(table)], section.heading, said) for table in section.tables
    ]
    facts = [
        part
        for what, which in section.facts
        for part in (element("dt", what), element("dd", element("bdi", which)))
    ]
    return _framed(
        section.name,
        section.heading,
        element("p", section.introduction, class_="introduction"),
        *([_legend()] if _has_marks(section.tables) else []),
        *map(_picture, section.drawn),
        *tables,
        *([element("dl", *facts)] if facts else []),
    )


def _framed(name: str, heading: str, *parts: Element) -> Element:
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, *parts, id=name, aria_labelledby=f"{name}-heading")


def _has_marks(tables: tuple[Table, ...]) -> bool:
    return any(c.best for table in tables for row in (*table.rows, *table.summary) for c in row)


def _legend() -> Element:
    return element("p", element("span", BEST_SIGN, class_="sign"), " best of its row", class_="key")


def _picture(picture: Picture) -> Element:
    assert picture.figure is not None
    name = f"figure-{picture.name}"
    drawing = svg_element(picture.figure, name, picture.title, picture.description)
    caption = element("figcaption", element("strong", f"{picture.title}. "), picture.caption)
    return element("figure", element("div", drawing, class_="scroll"), caption, id=name)
