"""The documentation builds strictly, and can be read and searched offline."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# References that a browser fetches automatically.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation, built as in ``make docs``. --quiet would make --strict ignore warnings."""
    folder = tmp_path_factory.mktemp("site")
    (flags,) = re.findall(r"\$\(BIN\)/mkdocs build (.*)", (ROOT / "Makefile").read_text("utf-8"))
    assert flags.split() == ["--strict"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *flags.split(), "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def visit(browser, site):
    """``visit(page, **settings)`` opens the page from the disk, and lists its requests."""
    contexts = []

    def visited(name, **settings):
        contexts.append(browser.new_context(**settings))
        page, requests = contexts[-1].new_page(), []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / name).as_uri())
        return page, requests

    yield visited
    for context in contexts:
        context.close()


def test_every_page_is_built(site):
    sources = [path for path in (ROOT / "docs").rglob("*.md") if "hooks" not in path.parts]
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources]
    pages += [Path("tools") / f"{path.stem}.html" for path in (ROOT / "tools").glob("*.py")]
    pages += map(Path, ("tools/index.html", "performance.html", "contributing.html"))
    assert [page for page in pages if not (site / page).is_file()] == []
    assert not (site / "hooks").exists()


def test_pages_fetch_nothing_from_other_sites(site):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 40
    assert [str(path) for path in files if FETCHED.search(path.read_text("utf-8"))] == []


def test_the_search_works_from_the_disk(visit):
    page, requests = visit("index.html")
    page.click("input.md-search__input")
    # Wait for the index: letters typed before it is loaded are searched only after the next letter.
    page.wait_for_function("typeof __index !== 'undefined'")
    page.locator("input.md-search__input").press_sequentially("num-windows", delay=100)
    page.wait_for_selector(".md-search-result__article")
    found = page.locator(".md-search-result__item a").evaluate_all("all => all.map(a => a.href)")
    assert any("tools/compute_mixture.html" in link for link in found)
    assert not [link for link in found if "/files/" in link]
    assert requests
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
