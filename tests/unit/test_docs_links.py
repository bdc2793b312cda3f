"""Where the links of README and the pages lead, and what they become on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.hooks import repository_links as found

ROOT = Path(__file__).resolve().parents[2]
SOURCES = found.markdown_sources(ROOT)


def anchors_of(markdown: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts make them."""
    text = re.sub(r"^(```+).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


@pytest.mark.parametrize("source", SOURCES)
def test_every_link_leads_to_something_that_is_there(source):
    text = (ROOT / source).read_text(encoding="utf-8")
    broken = []
    for link in found.links(text):
        target = ROOT / found.target_of(link, source)
        is_there = target.exists() and ROOT in target.parents
        anchor = (link[2] or "").removeprefix("#")
        if not is_there or (anchor and anchor not in anchors_of(target.read_text("utf-8"))):
            broken.append(link[0])
    assert broken == []


def test_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    seen, waiting = set(), ["README.md"]
    while waiting:
        source = waiting.pop()
        for link in found.links((ROOT / source).read_text(encoding="utf-8")):
            target = found.target_of(link, source)
            if target.endswith(".md") and target not in seen:
                seen.add(target)
                waiting.append(target)
    assert {name for name in SOURCES if name.startswith("docs/")} <= seen


def test_what_readme_shows_of_the_quickstart_stands_on_the_first_page():
    (block,) = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block.rstrip() in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_links_become_links_between_pages_of_the_site():
    text = "[a](../examples/a.sh) [b](mixtures.md#x) [c](https://x.y) `[d](e)` [f](../tools/g.py)"
    assert found.with_site_links(text, "docs/page.md", "page.md") == (
        "[a](files/examples/a.sh.md) [b](mixtures.md#x) [c](https://x.y) `[d](e)` [f](tools/g.md)"
    )
    below = found.with_site_links("[a](../../LICENSE)[b](../x.md)", "docs/m/p.md", "m/p.md")
    assert below == "[a](../files/LICENSE.md)[b](../x.md)"
    top = found.with_site_links("[a](docs/m/p.md#q) [b](README.md)", "CONTRIBUTING.md", "c.md")
    assert top == "[a](m/p.md#q) [b](index.md)"


def test_links_in_fenced_code_are_code():
    text = "```\n[a](b.md)\n```\n[c](d.md)\n"
    assert [link[1] for link in found.links(text)] == ["d.md"]
    assert found.with_site_links(text, "docs/x.md", "x.md") == text


def test_a_file_that_is_linked_has_a_page_that_shows_it():
    linked = found.linked_files(ROOT)
    assert "examples/pretrain_684m.sh" in linked
    assert not [name for name in linked if name.startswith(("docs/", "tools/"))]
    page = found.file_page(ROOT, "examples/pretrain_684m.sh")
    assert (ROOT / "examples/pretrain_684m.sh").read_text() in page
    assert "```bash\n#!/usr/bin/env bash\n" in page


def test_the_fence_of_a_file_is_longer_than_any_in_it(tmp_path):
    (tmp_path / "a.md").write_text("````\ncode\n````\n")
    assert "`````markdown\n````\ncode\n````\n`````\n" in found.file_page(tmp_path, "a.md")
